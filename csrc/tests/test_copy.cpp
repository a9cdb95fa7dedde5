// The threads' copy and the kernel's body, on random tables, against a plain loop; conversions against their definition.
#include <cmath>
#include <limits>

#include "check.h"
#include "copy_cpu.h"
#include "random_table.h"

using namespace rollpacker;

namespace {

const DType kDTypes[] = {DType::kFloat32, DType::kBFloat16, DType::kFloat16};

void test_both_ways_equal_a_plain_loop() {
  std::mt19937_64 random(7);
  for (int round = 0; round < 12; ++round)
    for (DType from : kDTypes)
      for (DType to : kDTypes) {
        const RandomTable table(random, from, to, 12);
        const std::vector<char> source = random_numbers(random, from, table.source_elements);
        // The gaps hold 1s: nothing may be written there.
        std::vector<char> plain(static_cast<size_t>(table.destination_elements * size_of(to)), 1), threads = plain,
                          past_cache = plain, kernel = plain;
        with_types(from, to, [&](auto f, auto t) {
          copy_plainly(table.segments, reinterpret_cast<const decltype(f)*>(source.data()),
                       reinterpret_cast<decltype(t)*>(plain.data()));
        });
        copy_cpu(table.batch(source.data(), threads.data(), from, to), 1 + round % 3);
        copy_cpu(table.batch(source.data(), past_cache.data(), from, to), 1 + round % 3, Stores::kPastCache);
        copy_emulated(table.batch(source.data(), kernel.data(), from, to), round % 2 ? 256 : 33);
        CHECK(threads == plain);
        CHECK(past_cache == plain);
        CHECK(kernel == plain);
      }
}

// A segment of one long row, of rows just above and below a tile, and a batch that starts inside a table.
void test_rows_around_a_tile() {
  for (int64_t row : {kTileElements - 1, kTileElements, kTileElements + 1, 5 * kTileElements + 3}) {
    const int64_t rows = 3, pitch = row + 5;
    std::vector<float> source(static_cast<size_t>(rows * pitch)), threads(source.size(), -1.0f), past_cache = threads,
                       kernel = threads, plain = threads;
    for (size_t i = 0; i < source.size(); ++i) source[i] = static_cast<float>(i);
    const std::vector<Segment> segments{Segment{0, 0, row, pitch, pitch, 0, row}, Segment{0, 0, row, pitch, pitch, 1, rows * row}};
    const std::vector<int64_t> tile_begin{0, num_tiles(segments[0]), num_tiles(segments[0]) + num_tiles(segments[1])};
    auto second_of = [&](std::vector<float>& destination) {
      return Batch{&segments[1], &tile_begin[1], 1, DType::kFloat32, DType::kFloat32,
                   reinterpret_cast<int64_t>(source.data()), reinterpret_cast<int64_t>(destination.data())};
    };
    copy_cpu(second_of(threads), 2);
    copy_cpu(second_of(past_cache), 2, Stores::kPastCache);
    copy_emulated(second_of(kernel), 256);
    copy_plainly<float, float>({segments[1]}, source.data(), plain.data());
    CHECK(threads == plain);
    CHECK(past_cache == plain);
    CHECK(kernel == plain);
  }
}

void test_vectors_are_used_where_all_is_aligned() {
  alignas(16) float numbers[64] = {};
  CHECK((is_aligned(Segment{0, 0, 8, 8, 12, 0, 24}, numbers, numbers)));
  CHECK((!is_aligned(Segment{0, 0, 8, 8, 13, 0, 24}, numbers, numbers)));
  CHECK((!is_aligned(Segment{0, 0, 6, 8, 12, 0, 24}, numbers, numbers)));
  CHECK((!is_aligned(Segment{0, 0, 8, 8, 12, 2, 24}, numbers, numbers)));
  CHECK((is_aligned(Segment{0, 0, 7, 7, 7, 0, 7}, numbers, numbers)));  // one run: its tail goes by scalars
  CHECK((!is_aligned(Segment{0, 0, 8, 8, 8, 0, 8}, numbers + 1, numbers)));
}

// Every 16-bit number survives the way to fp32 and back; fp32 rounds to the nearest neighbour, ties to even.
template <class Half>
void test_conversions(int mantissa_bits) {
  for (uint32_t bits = 0; bits < 0x10000; ++bits) {
    const Half half{static_cast<uint16_t>(bits)};
    const float value = to_float(half);
    if (std::isnan(value)) {
      CHECK(std::isnan(to_float(from_float<Half>(value))));
      continue;
    }
    CHECK(from_float<Half>(value).bits == half.bits);
    const float next = to_float(Half{static_cast<uint16_t>(bits + 1)});
    if (std::isinf(value) || !std::isfinite(next) || std::signbit(value) != std::signbit(next)) continue;
    const float middle = static_cast<float>((static_cast<double>(value) + static_cast<double>(next)) / 2);
    CHECK(from_float<Half>(middle).bits == (bits % 2 ? bits + 1 : bits));
    CHECK(from_float<Half>(std::nextafter(middle, value)).bits == bits);
    CHECK(from_float<Half>(std::nextafter(middle, next)).bits == bits + 1);
  }
  const float infinity = std::numeric_limits<float>::infinity();
  CHECK(to_float(from_float<Half>(infinity)) == infinity);
  CHECK(to_float(from_float<Half>(-std::numeric_limits<float>::max())) == -infinity);
  CHECK(to_float(from_float<Half>(1.0f + std::ldexp(1.0f, -mantissa_bits))) > 1.0f);
  CHECK(to_float(from_float<Half>(1.0f + std::ldexp(1.0f, -mantissa_bits - 1))) == 1.0f);
  CHECK(from_float<Half>(-0.0f).bits == 0x8000);
}

void test_unknown_dtypes_are_refused() {
  bool is_refused = false;
  try {
    with_types(static_cast<DType>(9), DType::kFloat32, [](auto, auto) {});
  } catch (const std::invalid_argument&) {
    is_refused = true;
  }
  CHECK(is_refused);
}

}  // namespace

int main() {
  test_both_ways_equal_a_plain_loop();
  test_rows_around_a_tile();
  test_vectors_are_used_where_all_is_aligned();
  test_conversions<BFloat16>(7);
  test_conversions<Float16>(10);
  test_unknown_dtypes_are_refused();
  return 0;
}
