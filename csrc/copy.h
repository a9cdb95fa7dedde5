// The arithmetic of a strided copy with conversion, shared to the letter by g++ and nvcc.
//
// A segment is part of a block of the refit's plan (rollpacker/weights/plan.py): runs of `row_elements` elements, a pitch
// apart on either side, of which the elements [begin, end), counted along the runs, are copied. Work is cut into tiles; a tile
// is what one CUDA block or one turn of a CPU thread does. The whole body of the kernel is copy_tile(), a function of
// (tile, lane), so that the CPU tests run every line of it. No CUDA header, no allocation, no exception in this file.
#pragma once

#include <cstdint>
#include <cstring>

#if defined(__CUDACC__)
#define ROLLPACKER_HD __host__ __device__ __forceinline__
#else
#define ROLLPACKER_HD inline
#endif

namespace rollpacker {

// Addresses are bytes, relative to a base that the caller adds; everything else counts elements.
struct Segment {
  int64_t source, destination;
  int64_t row_elements;
  int64_t source_pitch, destination_pitch;
  int64_t begin, end;
};
constexpr int kSegmentFields = 7;
static_assert(sizeof(Segment) == kSegmentFields * sizeof(int64_t), "a segment is a row of an int64 table");

constexpr int64_t kTileElements = 8192;

struct BFloat16 {
  uint16_t bits;
};
struct Float16 {
  uint16_t bits;
};

template <class To, class From>
ROLLPACKER_HD To bits_as(From from) {
  static_assert(sizeof(To) == sizeof(From), "the same bits");
  To to;
  memcpy(&to, &from, sizeof to);
  return to;
}

ROLLPACKER_HD float to_float(float x) { return x; }
ROLLPACKER_HD float to_float(BFloat16 x) { return bits_as<float>(uint32_t{x.bits} << 16); }
ROLLPACKER_HD float to_float(Float16 x) {
  const uint32_t sign = uint32_t{x.bits} >> 15 << 31, magnitude = uint32_t(x.bits & 0x7fff) << 13;
  if (magnitude >= 0x0f800000) return bits_as<float>(sign | 0x70000000 | magnitude);  // infinities and NaN
  // The exponent's bias is 15 there and 127 here; the product also normalises what was subnormal.
  const float value = bits_as<float>(magnitude) * 0x1p112f;
  return bits_as<float>(sign | bits_as<uint32_t>(value));
}

// Round to nearest, ties to even; NaN stays NaN.
template <class To>
ROLLPACKER_HD To from_float(float x);
template <>
ROLLPACKER_HD float from_float<float>(float x) {
  return x;
}
template <>
ROLLPACKER_HD BFloat16 from_float<BFloat16>(float x) {
  const uint32_t bits = bits_as<uint32_t>(x);
  const uint32_t rounded = (bits + 0x7fff + (bits >> 16 & 1)) >> 16;
  return BFloat16{static_cast<uint16_t>((bits & 0x7fffffff) > 0x7f800000 ? 0x7fc0 : rounded)};
}
template <>
ROLLPACKER_HD Float16 from_float<Float16>(float x) {
  const uint32_t bits = bits_as<uint32_t>(x), sign = bits >> 16 & 0x8000, magnitude = bits & 0x7fffffff;
  uint32_t half;
  if (magnitude > 0x7f800000) {
    half = 0x7e00;
  } else if (magnitude >= 0x477ff000) {  // 65520 and more round to infinity
    half = 0x7c00;
  } else if (magnitude >= 0x38800000) {  // 2^-14, the smallest normal number
    half = (magnitude - 0x38000000 + 0xfff + (magnitude >> 13 & 1)) >> 13;
  } else {  // an ulp of 0.5f is the step of the subnormal numbers, so the sum rounds as it should
    half = bits_as<uint32_t>(bits_as<float>(magnitude) + 0.5f) - 0x3f000000;
  }
  return Float16{static_cast<uint16_t>(sign | half)};
}

template <class To, class From>
struct Convert {
  ROLLPACKER_HD static To of(From x) { return from_float<To>(to_float(x)); }
};
template <class Same>
struct Convert<Same, Same> {
  ROLLPACKER_HD static Same of(Same x) { return x; }
};

ROLLPACKER_HD int64_t num_tiles(const Segment& s) { return (s.end - s.begin + kTileElements - 1) / kTileElements; }

// The last of n segments whose first tile is at or before `tile`; tile_begin has n + 1 entries.
ROLLPACKER_HD int64_t find_segment(const int64_t* tile_begin, int64_t n, int64_t tile) {
  int64_t low = 0, high = n;
  while (high - low > 1) {
    const int64_t middle = (low + high) / 2;
    if (tile_begin[middle] <= tile) {
      low = middle;
    } else {
      high = middle;
    }
  }
  return low;
}

struct Position {
  int64_t source, destination;
};

// Where the elements of one tile lie. One 64-bit division a tile; within it at most a 32-bit one an element.
struct TileRows {
  int64_t row, column, row_elements, source_pitch, destination_pitch;

  ROLLPACKER_HD TileRows(const Segment& s, int64_t begin)
      : row(begin / s.row_elements),
        column(begin % s.row_elements),
        row_elements(s.row_elements),
        source_pitch(s.source_pitch),
        destination_pitch(s.destination_pitch) {}

  // Of the tile's element number i, 0 <= i < kTileElements.
  ROLLPACKER_HD Position at(int64_t i) const {
    int64_t r = row, c = column + i;
    if (c >= row_elements) {
      if (row_elements > kTileElements) {  // a tile crosses into the next row at most
        r += 1;
        c -= row_elements;
      } else {
        const uint32_t rows = static_cast<uint32_t>(c) / static_cast<uint32_t>(row_elements);
        r += rows;
        c -= rows * row_elements;
      }
    }
    return Position{r * source_pitch + c, r * destination_pitch + c};
  }
};

template <class T, int N>
struct alignas(16) Vector {
  T values[N];
};

// Elements that a lane moves at once where everything is aligned: 16 bytes on the narrower side.
template <class From, class To>
ROLLPACKER_HD constexpr int vector_elements() {
  return 16 / static_cast<int>(sizeof(From) < sizeof(To) ? sizeof(From) : sizeof(To));
}

template <class From, class To>
ROLLPACKER_HD bool is_aligned(const Segment& s, const From* source, const To* destination) {
  constexpr int n = vector_elements<From, To>();
  uint64_t bytes = reinterpret_cast<uintptr_t>(source) | reinterpret_cast<uintptr_t>(destination);
  uint64_t elements = static_cast<uint64_t>(s.begin);
  if (s.end > s.row_elements) {  // more than one run
    bytes |= static_cast<uint64_t>(s.source_pitch) * sizeof(From) | static_cast<uint64_t>(s.destination_pitch) * sizeof(To);
    elements |= static_cast<uint64_t>(s.row_elements);
  }
  return bytes % 16 == 0 && elements % n == 0;
}

template <int N, class From, class To>
ROLLPACKER_HD void copy_lane(const TileRows& rows, const From* source, To* destination, int64_t size, int64_t lane,
                             int64_t lanes) {
  for (int64_t i = lane * N; i < size; i += lanes * N) {
    const Position at = rows.at(i);
    if (N > 1 && i + N <= size) {
      const Vector<From, N> in = *reinterpret_cast<const Vector<From, N>*>(source + at.source);
      Vector<To, N> out;
      for (int k = 0; k < N; ++k) out.values[k] = Convert<To, From>::of(in.values[k]);
      *reinterpret_cast<Vector<To, N>*>(destination + at.destination) = out;
    } else {  // scalars, or the tail of a vectorised segment: its last elements lie in one run
      for (int64_t k = 0; k < N && i + k < size; ++k)
        destination[at.destination + k] = Convert<To, From>::of(source[at.source + k]);
    }
  }
}

// The elements of a tile, counted from the segment's first run.
struct TileRange {
  int64_t begin, size;
};
ROLLPACKER_HD TileRange tile_range(const Segment& s, int64_t tile_in_segment) {
  const int64_t begin = s.begin + tile_in_segment * kTileElements;
  return TileRange{begin, s.end - begin < kTileElements ? s.end - begin : kTileElements};
}

// The body of the CUDA kernel: what lane `lane` of `lanes` does of one tile of the segments.
template <class From, class To>
ROLLPACKER_HD void copy_tile(const Segment* segments, const int64_t* tile_begin, int64_t n, int64_t source_base,
                             int64_t destination_base, int64_t tile, int64_t lane, int64_t lanes) {
  const int64_t k = find_segment(tile_begin, n, tile);
  const Segment s = segments[k];
  const From* source = reinterpret_cast<const From*>(source_base + s.source);
  To* destination = reinterpret_cast<To*>(destination_base + s.destination);
  const TileRange range = tile_range(s, tile - tile_begin[k]);
  const TileRows rows(s, range.begin);
  if (is_aligned(s, source, destination)) {
    copy_lane<vector_elements<From, To>()>(rows, source, destination, range.size, lane, lanes);
  } else {
    copy_lane<1>(rows, source, destination, range.size, lane, lanes);
  }
}

}  // namespace rollpacker
