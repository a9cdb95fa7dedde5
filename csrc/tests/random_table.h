// Random segments between two buffers, and the same copy element by element.
#pragma once

#include <algorithm>
#include <cmath>
#include <random>
#include <vector>

#include "batch.h"

namespace rollpacker {

struct RandomTable {
  std::vector<Segment> segments;  // addresses count from the buffers' starts
  std::vector<int64_t> tile_begin{0};
  int64_t source_elements = 0, destination_elements = 0;

  // Rows of all lengths around the vector widths and the tile, some aligned and some not, some cut at either end.
  RandomTable(std::mt19937_64& random, DType from, DType to, int num_segments) {
    for (int k = 0; k < num_segments; ++k) {
      const int64_t unit = random() % 2 ? 8 : 1;
      const bool is_long = random() % 4 == 0;
      Segment s{};
      s.row_elements = unit * static_cast<int64_t>(is_long ? 1 + random() % 3000 : 1 + random() % 40);
      const int64_t rows = static_cast<int64_t>(is_long ? 1 + random() % 12 : 1 + random() % 300);
      s.source_pitch = s.row_elements + unit * static_cast<int64_t>(random() % 5);
      s.destination_pitch = s.row_elements + unit * static_cast<int64_t>(random() % 5);
      const int64_t size = rows * s.row_elements;
      s.begin = random() % 2 ? 0 : std::min<int64_t>(size, unit * static_cast<int64_t>(random() % 50));
      s.end = random() % 2 ? size : size - std::min<int64_t>(size - s.begin, static_cast<int64_t>(random() % 50));
      source_elements = (source_elements + 7) / 8 * 8 + (unit == 8 ? 0 : static_cast<int64_t>(random() % 3));
      destination_elements = (destination_elements + 7) / 8 * 8 + (unit == 8 ? 0 : static_cast<int64_t>(random() % 3));
      s.source = source_elements * size_of(from);
      s.destination = destination_elements * size_of(to);
      source_elements += rows * s.source_pitch;
      destination_elements += rows * s.destination_pitch;
      segments.push_back(s);
      tile_begin.push_back(tile_begin.back() + num_tiles(s));
    }
  }

  Batch batch(const void* source, void* destination, DType from, DType to) const {
    return Batch{segments.data(), tile_begin.data(), static_cast<int64_t>(segments.size()), from, to,
                 reinterpret_cast<int64_t>(source), reinterpret_cast<int64_t>(destination)};
  }
};

template <class From, class To>
void copy_plainly(const std::vector<Segment>& segments, const From* source, To* destination) {
  for (const Segment& s : segments)
    for (int64_t i = s.begin; i < s.end; ++i) {
      const int64_t row = i / s.row_elements, column = i % s.row_elements;
      destination[s.destination / static_cast<int64_t>(sizeof(To)) + row * s.destination_pitch + column] =
          Convert<To, From>::of(source[s.source / static_cast<int64_t>(sizeof(From)) + row * s.source_pitch + column]);
    }
}

// Numbers of all sizes, without NaN: two of them need not have the same bits.
inline std::vector<char> random_numbers(std::mt19937_64& random, DType dtype, int64_t size) {
  std::vector<char> bytes(static_cast<size_t>(size * size_of(dtype)));
  std::normal_distribution<float> normal(0.0f, 1.0f);
  with_types(dtype, dtype, [&](auto, auto type) {
    auto* numbers = reinterpret_cast<decltype(type)*>(bytes.data());
    for (int64_t i = 0; i < size; ++i)
      numbers[i] = from_float<decltype(type)>(std::ldexp(normal(random), static_cast<int>(random() % 40) - 30));
  });
  return bytes;
}

}  // namespace rollpacker
