// Work in pieces, shared among the threads of the caller's own OpenMP: they are there, and no others have to be.
#pragma once

#include <atomic>
#include <cstdint>

struct Team {
  int64_t threads;
  // GOMP_parallel of the runtime that the caller uses, or null: https://gcc.gnu.org/onlinedocs/libgomp/Implementing-PARALLEL-construct.html
  void (*parallel)(void (*work)(void *), void *data, unsigned threads, unsigned flags);

  // piece(0) to piece(count - 1), each once, by whoever is free. Pieces must not throw.
  template <class Piece> void share(int64_t count, const Piece &piece) const {
    std::atomic<int64_t> next{0};
    auto work = [&] {
      for (int64_t index; (index = next.fetch_add(1, std::memory_order_relaxed)) < count;) piece(index);
    };
    if (!parallel || threads < 2 || count < 2) return work();
    parallel([](void *data) { (*(decltype(work) *)data)(); }, &work, (unsigned)threads, 0);
  }
};
