#include "copy_cpu.h"

#include <algorithm>
#include <atomic>
#include <thread>
#include <vector>

#ifdef __SSE2__
#include <emmintrin.h>
#endif

namespace rollpacker {
namespace {

constexpr int64_t kTilesPerTurn = 32;  // 512 KiB of bf16: large enough for memcpy, small enough to share out

#ifdef __SSE2__
constexpr size_t kLine = 64;

// Whole lines past the cache, what is left at either end as usual. `finish_stores` makes other threads see them in order.
void copy_past_cache(const char* source, char* destination, size_t size) {
  const size_t head = std::min(size, (kLine - reinterpret_cast<uintptr_t>(destination) % kLine) % kLine);
  std::memcpy(destination, source, head);
  const char* const last_line = source + head + (size - head) / kLine * kLine;
  const size_t tail = (size - head) % kLine;
  source += head;
  destination += head;
  for (; source != last_line; source += kLine, destination += kLine) {
    __m128i line[4];
    for (int i = 0; i < 4; ++i) line[i] = _mm_loadu_si128(reinterpret_cast<const __m128i*>(source) + i);
    for (int i = 0; i < 4; ++i) _mm_stream_si128(reinterpret_cast<__m128i*>(destination) + i, line[i]);
  }
  std::memcpy(destination, source, tail);
}
void finish_stores() { _mm_sfence(); }
#else  // memcpy's own choice
void copy_past_cache(const char* source, char* destination, size_t size) { std::memcpy(destination, source, size); }
void finish_stores() {}
#endif

template <class From, class To>
void copy_run(const From* source, To* destination, int64_t size, Stores stores) {
  if constexpr (std::is_same_v<From, To>) {
    const size_t bytes = static_cast<size_t>(size) * sizeof(To);
    if (stores == Stores::kPastCache) {
      copy_past_cache(reinterpret_cast<const char*>(source), reinterpret_cast<char*>(destination), bytes);
    } else {
      std::memcpy(destination, source, bytes);
    }
  } else {
    for (int64_t i = 0; i < size; ++i) destination[i] = Convert<To, From>::of(source[i]);
  }
}

// Elements [begin, begin + size) of a segment; `size` may span many tiles, so that long runs are long memcpys.
template <class From, class To>
void copy_range(const Segment& s, const Batch& batch, int64_t begin, int64_t size, Stores stores) {
  const From* source = reinterpret_cast<const From*>(batch.source_base + s.source);
  To* destination = reinterpret_cast<To*>(batch.destination_base + s.destination);
  int64_t row = begin / s.row_elements, column = begin % s.row_elements;
  while (size > 0) {
    const int64_t run = std::min(s.row_elements - column, size);
    copy_run(source + row * s.source_pitch + column, destination + row * s.destination_pitch + column, run, stores);
    size -= run;
    row += 1;
    column = 0;
  }
}

template <class From, class To>
void copy_tiles(const Batch& batch, int64_t first, int64_t last, Stores stores) {
  int64_t k = find_segment(batch.tile_begin, batch.size, first);
  while (first < last) {
    const Segment& s = batch.segments[k];
    const int64_t stop = std::min(last, batch.tile_begin[k + 1]);
    if (first < stop) {
      const int64_t begin = tile_range(s, first - batch.tile_begin[k]).begin;
      const TileRange end = tile_range(s, stop - 1 - batch.tile_begin[k]);
      copy_range<From, To>(s, batch, begin, end.begin + end.size - begin, stores);
    }
    first = stop;
    k += 1;
  }
}

}  // namespace

void copy_cpu(const Batch& batch, int threads, Stores stores) {
  if (batch.size == 0) return;
  const int64_t first = batch.tile_begin[0], last = batch.tile_begin[batch.size];
  with_types(batch.from, batch.to, [&](auto from, auto to) {
    std::atomic<int64_t> next{first};
    auto work = [&] {
      for (int64_t tile; (tile = next.fetch_add(kTilesPerTurn)) < last;)
        copy_tiles<decltype(from), decltype(to)>(batch, tile, std::min(tile + kTilesPerTurn, last), stores);
      finish_stores();
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
