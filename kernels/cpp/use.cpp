// All that a sample measures of one use of a weight, in one call: what lies between kernels costs as much as some of them.
//
// The work is cut where nothing is added up across the cut but stripes' sums, and those are added in order: results are
// the same bits with any number of threads, and those of the kernels called one by one.

#include <chrono>
#include <cstring>
#include <memory>
#include <new>
#include <vector>

#include "levels.h"
#include "stats.h"
#include "use.h"

namespace {

constexpr int64_t BLOCK = 128;
constexpr int64_t FEW_ELEMENTS = 1 << 16;  // less than that is not worth waking anybody
constexpr int64_t STRIP_COLUMNS = 64;      // of an exact product, at least so many at once
constexpr size_t KEPT_BYTES = 8 << 20;     // memory that a thread keeps: new pages cost more than the products

int64_t blocks_of(int64_t count) { return (count + BLOCK - 1) / BLOCK; }
int64_t smaller(int64_t a, int64_t b) { return a < b ? a : b; }

// Memory for results that nobody sees, the same from call to call.
class Scratch {
  std::vector<char> bytes_;
  size_t used_ = 0;

public:
  explicit Scratch(size_t bytes) {
    bytes_.swap(kept());
    if (bytes_.size() < bytes) bytes_.resize(bytes);
  }
  ~Scratch() {
    if (bytes_.size() <= KEPT_BYTES) bytes_.swap(kept());
  }
  template <class Element> Element *take(int64_t count) {
    size_t start = ((uintptr_t)bytes_.data() + used_ + 63) / 64 * 64 - (uintptr_t)bytes_.data();
    used_ = start + count * sizeof(Element);
    return (Element *)(bytes_.data() + start);
  }
  static size_t bytes_of(int64_t count, size_t element) { return count * element + 64; }

private:
  static std::vector<char> &kept() {
    static thread_local std::vector<char> bytes;
    return bytes;
  }
};

// The statistics of one matrix in some layouts, a stripe of 128 rows at a time. Without a layout there are no stripes.
struct Striped {
  Job job;                 // of the whole matrix; its statistics are where those of all stripes go
  int64_t rows, stripes;
  double *parts = nullptr; // [stripe, layout, 29], zeros before

  Striped(const Matrix &matrix, const OperandGrid &grid, const double *edges, int64_t output)
      : job{matrix.values, matrix.is_bfloat16, matrix.columns, matrix.stride, nullptr, 1, grid.grid, edges, grid.wide_sums, output, {}, {}, {}},
        rows(matrix.rows), stripes(0) {}
  void want(Layout &layout, const Layout &wanted) { layout = wanted, stripes = blocks_of(rows); }
  int64_t parts_count() const { return stripes * 3 * VECTOR_LENGTH; }
  void room(double *memory) {
    parts = memory;
    std::memset(parts, 0, parts_count() * sizeof(double));
  }

  void measure(int64_t stripe, int level) const {
    int64_t bounds[2] = {stripe * BLOCK, smaller((stripe + 1) * BLOCK, rows)};
    Job here = job;
    here.bounds = bounds;
    double *part = parts + stripe * 3 * VECTOR_LENGTH;
    for (Layout *layout : {&here.row, &here.tile, &here.col}) {
      layout->stats = part;
      part += VECTOR_LENGTH;
    }
    // Codes have their place by the row; scales, of tiles alone here, by the block from the first row on.
    if (here.tile.scales) here.tile.scales += stripe * blocks_of(job.columns);
    quantize(here, level);
  }

  // All stripes' into one, as if there had been one pass.
  void add_up() const {
    const Layout *layouts[] = {&job.row, &job.tile, &job.col};
    for (int index = 0; stripes && index < 3; index++) {
      if (!layouts[index]->wanted) continue;
      double *all = layouts[index]->stats, low[4] = {};
      for (int64_t stripe = 0; stripe < stripes; stripe++) {
        const double *part = parts + (stripe * 3 + index) * VECTOR_LENGTH;
        for (int place = 0; place < VECTOR_LENGTH; place++) {
          if (place == AMAX) all[place] = part[place] > all[place] ? part[place] : all[place];
          else if (place >= SUM_SQ && place <= SUM_4TH) add_exactly(all[place], low[place - SUM_SQ], part[place]);
          else all[place] += part[place];
        }
      }
      for (int sum = 0; sum < 4; sum++) all[SUM_SQ + sum] += low[sum];
    }
  }
};

// The sampled rows of dy w in FP8, for a use that has no real result.
class Emulated {
  const Use &use_;
  int64_t columns_, depth_, blocks_, element_;
  char *rows_ = nullptr;
  uint8_t *codes_ = nullptr;
  float *scales_ = nullptr;
  GemmSegment *segments_ = nullptr;

public:
  float *out = nullptr; // [sampled, columns]

  Emulated(const Use &use, int64_t columns)
      : use_(use), columns_(columns), depth_(use.operand.columns), blocks_(blocks_of(depth_)), element_(use.operand.is_bfloat16 ? 2 : 4) {}
  bool wanted() const { return !use_.actual.values; }
  size_t bytes() const {
    if (!wanted()) return 0;
    return Scratch::bytes_of(use_.sampled * depth_, element_) + Scratch::bytes_of(use_.sampled * depth_, 1) +
           Scratch::bytes_of(use_.sampled * blocks_, sizeof(float)) + Scratch::bytes_of(blocks_, sizeof(GemmSegment)) +
           Scratch::bytes_of(use_.sampled * columns_, sizeof(float));
  }
  void room(Scratch &scratch) {
    if (!wanted()) return;
    rows_ = scratch.take<char>(use_.sampled * depth_ * element_);
    codes_ = scratch.take<uint8_t>(use_.sampled * depth_);
    scales_ = scratch.take<float>(use_.sampled * blocks_);
    segments_ = scratch.take<GemmSegment>(blocks_);
    out = scratch.take<float>(use_.sampled * columns_);
  }

  // Codes of the sampled rows.
  void prepare(int level) const {
    if (!wanted()) return;
    const Matrix &from = use_.operand;
    for (int64_t row = 0; row < use_.sampled; row++)
      std::memcpy(rows_ + row * depth_ * element_, (const char *)from.values + use_.places[row] * from.stride * element_, depth_ * element_);
    for (int64_t block = 0; block < blocks_; block++)
      segments_[block] = GemmSegment{block * BLOCK, smaller((block + 1) * BLOCK, depth_), block, block};
    int64_t bounds[2] = {0, use_.sampled};
    Job job{rows_, from.is_bfloat16, depth_, depth_, bounds, 1, use_.operand_grid.grid, use_.edges, use_.operand_grid.wide_sums, 1, {}, {}, {}};
    job.row = Layout{1, scales_, codes_, nullptr};
    quantize(job, level);
  }

  // Columns of the product, `first` a multiple of 128.
  void multiply(int64_t first, int64_t last, int level) const {
    GemmGroup group{0, use_.sampled, 0, 0, 0, blocks_};
    GemmOperand a{codes_, depth_, 1, 0, use_.operand_grid.is_e5m2, scales_, blocks_, 1, 0, 1};
    GemmOperand b{use_.codes + first, 1, columns_, 0, use_.weight_grid.is_e5m2, use_.scales + first / BLOCK, 1, blocks_of(columns_), 0, BLOCK};
    gemm(GemmJob{a, b, last - first, out + first, 0, columns_, 0, 0, &group, 1, segments_}, level);
  }
};

// Pieces of whole `unit`s of columns, for so many threads to share.
struct Columns {
  int64_t columns, each, count;
  Columns(int64_t columns, int64_t unit, int64_t pieces) : columns(columns) {
    int64_t units = (columns + unit - 1) / unit;
    each = (units + pieces - 1) / pieces * unit;
    count = each ? (columns + each - 1) / each : 0;
  }
  int64_t first(int64_t index) const { return index * each; }
  int64_t last(int64_t index) const { return smaller((index + 1) * each, columns); }
};

// What pieces say to the whole.
struct Told {
  std::atomic<bool> lost{false}, failed{false};  // for want of memory: statistics, the product
  std::atomic<int32_t> most{0};                  // the largest bits of the weight
  std::atomic<int64_t> statistics{0}, product{0}; // nanoseconds
  void see(int32_t bits) {
    int32_t before = most.load(std::memory_order_relaxed);
    while (bits > before && !most.compare_exchange_weak(before, bits, std::memory_order_relaxed)) {
    }
  }
};

// Adds what passes until its end.
class Stopwatch {
  std::atomic<int64_t> &to_;
  std::chrono::steady_clock::time_point begun_ = std::chrono::steady_clock::now();

public:
  explicit Stopwatch(std::atomic<int64_t> &to) : to_(to) {}
  ~Stopwatch() { to_.fetch_add(std::chrono::nanoseconds(std::chrono::steady_clock::now() - begun_).count(), std::memory_order_relaxed); }
};

int measure(const Use &use, int level, int gemm_level) {
  auto begun = std::chrono::steady_clock::now();
  ExactSubnormals subnormals;
  Striped operand(use.operand, use.operand_grid, use.edges, 0), weight(use.weight, use.weight_grid, use.edges, 1);
  if (use.wants_row) operand.want(operand.job.row, Layout{1, nullptr, nullptr, use.stats});
  if (use.wants_col) operand.want(operand.job.col, Layout{1, nullptr, nullptr, use.stats + VECTOR_LENGTH});
  if (use.wants_weight) {
    weight.want(weight.job.tile, Layout{1, use.scales, use.codes, use.stats + 2 * VECTOR_LENGTH});
    ask_for_large_pages(use.codes, use.weight.rows * use.weight.columns);
  }
  int64_t columns = use.forward ? use.weight.rows : use.weight.columns;
  Emulated emulated(use, columns);
  Scratch scratch(Scratch::bytes_of(use.sampled * columns, sizeof(float)) + emulated.bytes() +
                  Scratch::bytes_of(operand.parts_count(), sizeof(double)) + Scratch::bytes_of(weight.parts_count(), sizeof(double)));
  float *exact = scratch.take<float>(use.sampled * columns);
  emulated.room(scratch);
  operand.room(scratch.take<double>(operand.parts_count()));
  weight.room(scratch.take<double>(weight.parts_count()));

  Team team = use.team;
  if (use.operand.rows * use.operand.columns + use.weight.rows * use.weight.columns < FEW_ELEMENTS) team.threads = 1;
  const Matrix &a = use.operand, &b = use.weight, &actual = use.actual;
  ExactJob job{a.values, a.is_bfloat16, a.stride, 1, use.places, use.sampled, a.columns, columns, b.values, b.is_bfloat16, b.stride, use.forward, exact};
  std::unique_ptr<ExactProduct> product(exact_product(job, gemm_level));
  // A stripe of the weight that is read for both is still near when it is read again. Else there are some more pieces than
  // threads: not all of them run equally fast.
  bool reads_twice = product && use.forward && weight.stripes;
  Columns sums(product ? columns : 0, reads_twice ? BLOCK : STRIP_COLUMNS, reads_twice ? weight.stripes : 4 * team.threads);
  Columns products(product && emulated.wanted() ? columns : 0, BLOCK, team.threads);
  Told told;
  auto look = [&](const Striped &matrix, int64_t stripe) {
    ExactSubnormals of_this_thread;
    Stopwatch watch(told.statistics);
    try {
      matrix.measure(stripe, level);
    } catch (const std::bad_alloc &) {
      told.lost = true;
    }
  };
  auto weigh = [&](int64_t stripe) { look(weight, stripe); };
  auto multiply = [&](int64_t index) {
    ExactSubnormals of_this_thread;
    Stopwatch watch(told.product);
    try {
      if (index < products.count) return emulated.multiply(products.first(index), products.last(index), gemm_level);
      index -= products.count;
      told.see(product->sum(sums.first(index), sums.last(index)));
    } catch (const std::bad_alloc &) {
      told.failed = true;
    }
  };
  // Codes that a product takes have to be there before it.
  if (!reads_twice) team.share(weight.stripes, weigh);
  if (products.count) emulated.prepare(level);
  team.share(operand.stripes + products.count + sums.count, [&](int64_t index) {
    if (index < operand.stripes) return look(operand, index);
    multiply(index - operand.stripes);
    if (reads_twice) weigh(index - operand.stripes);
  });
  if (told.lost) throw std::bad_alloc();
  operand.add_up(), weight.add_up();
  bool judged = product && !told.failed && product->holds(told.most);
  if (judged) {
    Comparison comparison{exact, columns, actual.values, actual.is_bfloat16, actual.stride, use.places, use.bias, use.sampled, columns, use.stats + 3 * VECTOR_LENGTH};
    if (products.count) comparison.actual = emulated.out, comparison.actual_is_bfloat16 = 0, comparison.actual_stride = columns, comparison.places = nullptr;
    compare(comparison, level);
  }
  // The threads' time says whose the time was that passed.
  double passed = std::chrono::duration<double>(std::chrono::steady_clock::now() - begun).count();
  double statistics = told.statistics, all = statistics + told.product;
  *use.operand_seconds = all > 0 ? passed * statistics / all : 0.0;
  return judged ? 0 : 1;
}

} // namespace

#define FP8_EXPORT __attribute__((visibility("default")))

extern "C" {

FP8_EXPORT int64_t fp8_native_use_bytes() { return sizeof(Use); }

// 0, or 1 where the product cannot be recomputed at that level or with those numbers: then its statistics stay zeros. -1
// without memory for anything.
FP8_EXPORT int fp8_native_use(const Use *use, int level, int gemm_level) {
  try {
    return measure(*use, level, gemm_level);
  } catch (const std::bad_alloc &) {
    return -1;
  }
}

}
