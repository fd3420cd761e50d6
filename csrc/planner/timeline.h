// search/timeline.py.
#pragma once

#include <algorithm>
#include <utility>
#include <vector>

#include "problem.h"

namespace zb {

class Timeline {
 public:
  explicit Timeline(const zb_problem& problem)
      : p(problem),
        m(problem.num_microbatches),
        begin(row_begins(problem)),
        starts(begin.back()),
        number(begin.back()),
        places(begin.back()),
        ends(begin.back()),
        count(3 * problem.num_stages),
        at(problem.num_ranks),
        waits_for(problem.num_ranks),
        free_at(problem.num_ranks) {}

  Cost evaluate(const int32_t* rows) {
    for (int r = 0; r < p.num_ranks; ++r) {
      double kept = 0.0;
      for (int i = begin[r]; i < begin[r + 1]; ++i) {
        const double change = p.delta[rows[i]];
        kept += change;
        if (change > 0 && kept > p.limit[r]) return {};
      }
    }
    run(rows);
    Cost result{-kNever, 0.0};
    for (int r = 0; r < p.num_ranks; ++r) {
      if (at[r] < begin[r + 1]) return {};
      const double cost = free_at[r] - p.origin[r];
      result.cost = std::max(result.cost, cost);
      result.mean += cost;
    }
    result.mean /= p.num_ranks;
    return result;
  }

  // Each pass as early as possible, as far as the rows get.
  void run(const int32_t* rows) {
    std::fill(count.begin(), count.end(), 0);
    runnable.clear();
    for (int r = 0; r < p.num_ranks; ++r) {
      at[r] = begin[r];
      free_at[r] = 0.0;
      waits_for[r] = kNone;
      runnable.push_back(r);
    }
    while (!runnable.empty()) {
      const int rank = runnable.back();
      runnable.pop_back();
      double now = free_at[rank];
      for (; at[rank] < begin[rank + 1]; ++at[rank]) {
        const int place = at[rank], code = rows[place], source = p.source[code], n = count[code];
        double arrival = p.hop[code];
        if (source != kNone) {
          if (n >= count[source]) {
            waits_for[rank] = source;
            break;
          }
          arrival = ends[source * m + n] + p.hop[code];
        }
        now = std::max(now, arrival);
        starts[place] = now;
        number[place] = n;
        places[code * m + n] = place;
        now += p.duration[code];
        ends[code * m + n] = now;
        ++count[code];
        const int other = p.receiver[code];
        if (other != kNone && waits_for[other] == code) {
          waits_for[other] = kNone;
          runnable.push_back(other);
        }
      }
      free_at[rank] = now;
    }
  }

  const zb_problem& p;
  const int m;
  const std::vector<int> begin;
  std::vector<double> starts;
  std::vector<int> number, places;

 private:
  std::vector<double> ends;
  std::vector<int> count, at, waits_for, runnable;
  std::vector<double> free_at;
};

}  // namespace zb
