// All that a sample measures of one use of a weight, in one call: what lies between kernels costs as much as some of them.

#include <chrono>
#include <cstring>
#include <vector>

#include "exact.h"
#include "gemm.h"
#include "use.h"

extern "C" {
void fp8_native_quantize(const Job *job, int level);
int fp8_native_gemm(const GemmJob *job, int level);
void fp8_native_compare(const Comparison *job, int level);
int fp8_native_exact_rows(const ExactJob *job, int level);
}

namespace {

constexpr int64_t VECTOR = 29, TILE_ROWS = 128;
constexpr size_t KEPT_BYTES = 8 << 20; // memory that a thread keeps: new pages cost more than the products

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

int64_t blocks_of(int64_t count) { return (count + TILE_ROWS - 1) / TILE_ROWS; }

Job job_of(const Matrix &matrix, const int64_t *bounds, const OperandGrid &grid, const double *edges, int64_t output) {
  return Job{matrix.values, matrix.is_bfloat16, matrix.columns, matrix.stride, bounds, 1, grid.grid, edges, grid.wide_sums, output, {}, {}, {}};
}

void measure_operand(const Use &use, int level) {
  int64_t bounds[2] = {0, use.operand.rows};
  Job job = job_of(use.operand, bounds, use.operand_grid, use.edges, 0);
  if (use.wants_row) job.row = Layout{1, nullptr, nullptr, use.stats};
  if (use.wants_col) job.col = Layout{1, nullptr, nullptr, use.stats + VECTOR};
  if (use.wants_row || use.wants_col) fp8_native_quantize(&job, level);
}

void measure_weight(const Use &use, int level) {
  int64_t bounds[2] = {0, use.weight.rows};
  Job job = job_of(use.weight, bounds, use.weight_grid, use.edges, 1);
  job.tile = Layout{1, use.scales, use.codes, use.stats + 2 * VECTOR};
  if (use.wants_weight) fp8_native_quantize(&job, level);
}

// The sampled rows of dy w in FP8.
int emulate(const Use &use, float *out, int64_t columns, int level, int gemm_level, Scratch &scratch) {
  const Matrix &from = use.operand;
  int64_t depth = from.columns, blocks = blocks_of(depth), element = from.is_bfloat16 ? 2 : 4;
  char *rows = scratch.take<char>(use.sampled * depth * element);
  uint8_t *codes = scratch.take<uint8_t>(use.sampled * depth);
  float *scales = scratch.take<float>(use.sampled * blocks);
  GemmSegment *segments = scratch.take<GemmSegment>(blocks);
  for (int64_t row = 0; row < use.sampled; row++)
    std::memcpy(rows + row * depth * element, (const char *)from.values + use.places[row] * from.stride * element, depth * element);
  for (int64_t block = 0; block < blocks; block++) {
    int64_t first = block * TILE_ROWS, last = first + TILE_ROWS;
    segments[block] = GemmSegment{first, last < depth ? last : depth, block, block};
  }
  int64_t bounds[2] = {0, use.sampled};
  Job job = job_of(Matrix{rows, from.is_bfloat16, use.sampled, depth, depth}, bounds, use.operand_grid, use.edges, 1);
  job.row = Layout{1, scales, codes, nullptr};
  fp8_native_quantize(&job, level);
  GemmGroup group{0, use.sampled, 0, 0, 0, blocks};
  GemmOperand a{codes, depth, 1, 0, use.operand_grid.is_e5m2, scales, blocks, 1, 0, 1};
  GemmOperand b{use.codes, 1, columns, 0, use.weight_grid.is_e5m2, use.scales, 1, blocks_of(columns), 0, TILE_ROWS};
  GemmJob product{a, b, columns, out, 0, columns, 0, 0, &group, 1, segments};
  return fp8_native_gemm(&product, gemm_level);
}

int compare(const Use &use, int level, int gemm_level) {
  int64_t columns = use.forward ? use.weight.rows : use.weight.columns;
  int64_t depth = use.operand.columns, blocks = blocks_of(depth);
  Scratch scratch(2 * Scratch::bytes_of(use.sampled * columns, sizeof(float)) + Scratch::bytes_of(use.sampled * depth, sizeof(float)) +
                  Scratch::bytes_of(use.sampled * depth, 1) + Scratch::bytes_of(use.sampled * blocks, sizeof(float)) +
                  Scratch::bytes_of(blocks, sizeof(GemmSegment)));
  float *exact = scratch.take<float>(use.sampled * columns), *emulated = scratch.take<float>(use.sampled * columns);
  const Matrix &a = use.operand, &b = use.weight, &actual = use.actual;
  ExactJob product{a.values, a.is_bfloat16, a.stride, 1, use.places, use.sampled, a.columns, columns, b.values, b.is_bfloat16, b.stride, use.forward, exact};
  if (fp8_native_exact_rows(&product, gemm_level)) return 1;
  Comparison comparison{exact, columns, actual.values, actual.is_bfloat16, actual.stride, use.places, use.bias, use.sampled, columns, use.stats + 3 * VECTOR};
  if (!actual.values) {
    if (emulate(use, emulated, columns, level, gemm_level, scratch)) return 1;
    comparison.actual = emulated, comparison.actual_is_bfloat16 = 0, comparison.actual_stride = columns, comparison.places = nullptr;
  }
  fp8_native_compare(&comparison, level);
  return 0;
}

} // namespace

#define FP8_EXPORT __attribute__((visibility("default")))

extern "C" {

FP8_EXPORT int64_t fp8_native_use_bytes() { return sizeof(Use); }

// 0, or 1 where the product cannot be recomputed at that level or with those numbers: then its statistics stay zeros.
FP8_EXPORT int fp8_native_use(const Use *use, int level, int gemm_level) {
  auto begun = std::chrono::steady_clock::now();
  measure_operand(*use, level);
  measure_weight(*use, level);
  *use->operand_seconds = std::chrono::duration<double>(std::chrono::steady_clock::now() - begun).count();
  try {
    return compare(*use, level, gemm_level);
  } catch (const std::bad_alloc &) {
    return 1;
  }
}

}
