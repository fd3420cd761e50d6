// Checks of the input from Python; the loops use it as indices without further checks.
#pragma once

#include <cmath>
#include <sstream>
#include <stdexcept>
#include <utility>
#include <vector>

#include "problem.h"

namespace zb {

template <class... Parts>
void require(bool holds, const Parts&... parts) {
  if (holds) return;
  std::ostringstream sentence;
  (sentence << ... << parts);
  throw std::invalid_argument(sentence.str());
}

inline void check_column(const char* name, const std::vector<double>& column, int size, bool may_be_infinite = false) {
  require(static_cast<int>(column.size()) == size, name, " must have ", size, " figures; got ", column.size());
  for (double figure : column)
    require(may_be_infinite ? !std::isnan(figure) : std::isfinite(figure), name, " must have numbers; got ", figure);
}

inline void check_column(const char* name, const std::vector<int>& column, int size, int first, int end) {
  require(static_cast<int>(column.size()) == size, name, " must have ", size, " entries; got ", column.size());
  for (int entry : column)
    require(first <= entry && entry < end, name, " must be from ", first, " to below ", end, "; got ", entry);
}

inline Problem checked(Problem p) {
  for (int number : {p.num_ranks, p.num_stages, p.num_microbatches})
    require(number > 0, "the numbers of ranks, stages and microbatches must be 1 or more; got ", number);
  const int codes = 3 * p.num_stages;
  check_column("rank", p.rank, codes, 0, p.num_ranks);
  check_column("receiver", p.receiver, codes, kNone, p.num_ranks);
  check_column("source", p.source, codes, kNone, codes);
  check_column("successor", p.successor, codes, kNone, codes);
  check_column("wgrad", p.wgrad, codes, kNone, codes);
  check_column("duration", p.duration, codes);
  check_column("hop", p.hop, codes);
  check_column("delta", p.delta, codes);
  check_column("limit", p.limit, p.num_ranks, true);
  check_column("work", p.work, p.num_ranks);
  check_column("origin", p.origin, p.num_ranks);
  std::vector<int> times_fed(codes, 0);
  for (int c = 0; c < codes; ++c) {
    require(p.rank[c] == p.rank[c / 3 * 3], "a stage must be on one rank; stage ", c / 3, " is not");
    require(p.wgrad[c] == kNone || p.wgrad[c] % 3 == kWgrad, "wgrad must be a W; got code ", p.wgrad[c]);
    for (int fed : {p.successor[c], p.wgrad[c]}) {
      const bool fits = fed == kNone || (p.source[fed] == c && ++times_fed[fed] == 1);
      require(fits, "successor and wgrad must be the inverse of source; code ", c, " feeds ", fed);
    }
  }
  for (int s = 0; s < p.num_stages; ++s) p.may_fuse |= p.delta[3 * s + kBackward] > 0;
  const std::vector<int> begin = row_begins(p);
  for (int r = 0; r < p.num_ranks; ++r) require(begin[r] < begin[r + 1], "rank ", r, " must have a stage");
  return p;
}

}  // namespace zb
