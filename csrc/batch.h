// A batch is what one launch copies: consecutive segments of a table and the numbers of their first tiles.
#pragma once

#include <stdexcept>

#include "copy.h"

namespace rollpacker {

enum class DType : int { kFloat32 = 0, kBFloat16 = 1, kFloat16 = 2 };

inline int64_t size_of(DType dtype) { return dtype == DType::kFloat32 ? 4 : 2; }

struct Batch {
  const Segment* segments;
  const int64_t* tile_begin;  // of the whole table: size + 1 entries from the first segment on
  int64_t size;
  DType from, to;
  int64_t source_base, destination_base;
};

// Calls f(From{}, To{}) with the types of a batch.
template <class F>
void with_types(DType from, DType to, F f) {
  auto with_to = [&](auto source) {
    switch (to) {
      case DType::kFloat32: return f(source, float{});
      case DType::kBFloat16: return f(source, BFloat16{});
      case DType::kFloat16: return f(source, Float16{});
    }
    throw std::invalid_argument("unknown destination dtype");
  };
  switch (from) {
    case DType::kFloat32: return with_to(float{});
    case DType::kBFloat16: return with_to(BFloat16{});
    case DType::kFloat16: return with_to(Float16{});
  }
  throw std::invalid_argument("unknown source dtype");
}

}  // namespace rollpacker
