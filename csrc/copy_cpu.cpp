#include "copy_cpu.h"

#include <algorithm>
#include <atomic>
#include <thread>
#include <vector>

namespace rollpacker {
namespace {

constexpr int64_t kTilesPerTurn = 32;  // 512 KiB of bf16: large enough for memcpy, small enough to share out

template <class From, class To>
void copy_run(const From* source, To* destination, int64_t size) {
  if constexpr (std::is_same_v<From, To>) {
    std::memcpy(destination, source, static_cast<size_t>(size) * sizeof(To));
  } else {
    for (int64_t i = 0; i < size; ++i) destination[i] = Convert<To, From>::of(source[i]);
  }
}

// Elements [begin, begin + size) of a segment; `size` may span many tiles, so that long runs are long memcpys.
template <class From, class To>
void copy_range(const Segment& s, const Batch& batch, int64_t begin, int64_t size) {
  const From* source = reinterpret_cast<const From*>(batch.source_base + s.source);
  To* destination = reinterpret_cast<To*>(batch.destination_base + s.destination);
  int64_t row = begin / s.row_elements, column = begin % s.row_elements;
  while (size > 0) {
    const int64_t run = std::min(s.row_elements - column, size);
    copy_run(source + row * s.source_pitch + column, destination + row * s.destination_pitch + column, run);
    size -= run;
    row += 1;
    column = 0;
  }
}

template <class From, class To>
void copy_tiles(const Batch& batch, int64_t first, int64_t last) {
  int64_t k = find_segment(batch.tile_begin, batch.size, first);
  while (first < last) {
    const Segment& s = batch.segments[k];
    const int64_t stop = std::min(last, batch.tile_begin[k + 1]);
    if (first < stop) {
      const int64_t begin = tile_range(s, first - batch.tile_begin[k]).begin;
      const TileRange end = tile_range(s, stop - 1 - batch.tile_begin[k]);
      copy_range<From, To>(s, batch, begin, end.begin + end.size - begin);
    }
    first = stop;
    k += 1;
  }
}

}  // namespace

void copy_cpu(const Batch& batch, int threads) {
  if (batch.size == 0) return;
  const int64_t first = batch.tile_begin[0], last = batch.tile_begin[batch.size];
  with_types(batch.from, batch.to, [&](auto from, auto to) {
    std::atomic<int64_t> next{first};
    auto work = [&] {
      for (int64_t tile; (tile = next.fetch_add(kTilesPerTurn)) < last;)
        copy_tiles<decltype(from), decltype(to)>(batch, tile, std::min(tile + kTilesPerTurn, last));
    };
    const int64_t turns = (last - first + kTilesPerTurn - 1) / kTilesPerTurn;
    std::vector<std::thread> others;
    for (int64_t i = 1; i < std::min<int64_t>(threads, turns); ++i) others.emplace_back(work);
    work();
    for (auto& thread : others) thread.join();
  });
}

void copy_emulated(const Batch& batch, int lanes) {
  if (batch.size == 0) return;
  with_types(batch.from, batch.to, [&](auto from, auto to) {
    for (int64_t tile = batch.tile_begin[0]; tile < batch.tile_begin[batch.size]; ++tile)
      for (int lane = 0; lane < lanes; ++lane)
        copy_tile<decltype(from), decltype(to)>(batch.segments, batch.tile_begin, batch.size, batch.source_base,
                                                batch.destination_base, tile, lane, lanes);
  });
}

}  // namespace rollpacker
