// The one assertion of the C++ tests: always on, with the values' text and the place.
#pragma once

#include <cstdio>
#include <cstdlib>

#define CHECK(condition)                                                                \
  do {                                                                                  \
    if (!(condition)) {                                                                 \
      std::fprintf(stderr, "%s:%d: CHECK(%s) failed\n", __FILE__, __LINE__, #condition); \
      std::exit(1);                                                                     \
    }                                                                                   \
  } while (false)
