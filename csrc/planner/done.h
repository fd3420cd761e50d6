// The passes that have run, and the ranks that wait for a pass.
#pragma once

#include <algorithm>
#include <vector>

#include "problem.h"

namespace zb {

class Done {
 public:
  explicit Done(const Problem& problem)
      : p(problem),
        ends(3 * problem.num_stages * problem.num_microbatches),
        count(3 * problem.num_stages),
        waits_for(problem.num_ranks) {}

  // Resets the state: no pass has run, and every rank may run.
  void clear() {
    std::fill(count.begin(), count.end(), 0);
    std::fill(waits_for.begin(), waits_for.end(), kNone);
    runnable.clear();
    for (int r = 0; r < p.num_ranks; ++r) runnable.push_back(r);
  }

  // Returns a rank that may run; kNone if all ranks have ended or wait.
  int next_rank() {
    if (runnable.empty()) return kNone;
    const int rank = runnable.back();
    runnable.pop_back();
    return rank;
  }

  // Returns the arrival of the input of a code's next pass; kNever if its source has not run, and the rank then waits.
  double arrival(int code) {
    const int source = p.source[code];
    if (source == kNone) return p.hop[code];
    if (count[code] >= count[source]) {
      waits_for[p.rank[code]] = source;
      return kNever;
    }
    return ends[source * p.num_microbatches + count[code]] + p.hop[code];
  }

  // Returns the microbatch of a code's next pass.
  int number(int code) const { return count[code]; }

  // Records that the next pass of a code has run until `end`; returns its microbatch.
  int add(int code, double end) {
    const int n = count[code]++;
    ends[code * p.num_microbatches + n] = end;
    const int other = p.receiver[code];
    if (other != kNone && waits_for[other] == code) {
      waits_for[other] = kNone;
      runnable.push_back(other);
    }
    return n;
  }

 private:
  const Problem& p;
  std::vector<double> ends;
  std::vector<int> count, waits_for, runnable;
};

}  // namespace zb
