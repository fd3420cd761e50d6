// The hot loops of the schedule search: evaluate, compact, refill and refine rows of passes.
//
// Each does, operation by operation, what its namesake in megatron/zero_bubble/search does, so that both give the same
// numbers to the last bit (build without fused multiply-add); the Python is the reference and says why. A plain C
// interface without Python's headers: any host can load it.
//
// A row holds codes 3 * stage + kind (0 F, 1 B, 2 W); the n-th of a code is for microbatch n. The rows of all ranks lie
// one behind the other.

#include <algorithm>
#include <cstdint>
#include <vector>

#include "planner/compact.h"
#include "planner/problem.h"
#include "planner/refill.h"
#include "planner/refine.h"
#include "planner/timeline.h"

using namespace zb;

extern "C" {

// A problem with the memory that its loops work in; the arrays of the problem must outlive it.
struct zb_planner {
  const zb_problem problem;
  Timeline line;
  Compactor compactor;
  Refiller refiller;

  explicit zb_planner(const zb_problem& p) : problem(p), line(problem), compactor(problem), refiller(problem) {}
};

zb_planner* zb_open(const zb_problem* problem) { return new zb_planner(*problem); }

void zb_close(zb_planner* planner) { delete planner; }

// The cost of rows (infinity where infeasible); *mean is its mean over ranks.
double zb_evaluate(zb_planner* planner, const int32_t* rows, double* mean) {
  const Cost found = planner->line.evaluate(rows);
  *mean = found.mean;
  return found.cost;
}

// Rows run backwards in time, in place.
void zb_mirror(zb_planner* planner, int32_t* rows) {
  const std::vector<int>& begin = planner->line.begin;
  for (size_t r = 0; r + 1 < begin.size(); ++r) std::reverse(rows + begin[r], rows + begin[r + 1]);
  for (int i = 0; i < begin.back(); ++i) {
    const int kind = rows[i] % 3;
    rows[i] += kind == kForward ? 1 : kind == kBackward ? -1 : 0;
  }
}

// Reorders rows in place; 0 where they deadlock or do not fit. With backwards, problem and rows are mirrored ones.
int32_t zb_compact(zb_planner* planner, int32_t* rows, const int32_t* most_held, double haste, int32_t backwards) {
  return planner->compactor.run(rows, most_held, haste, backwards);
}

// Writes rows with their W's placed anew into full; 0 where they deadlock or do not fit.
int32_t zb_refill(zb_planner* planner, const int32_t* rows, double eagerness, double target, int32_t* full) {
  return planner->refiller.run(rows, eagerness, target, full);
}

// Improves rows in place and returns their cost.
double zb_refine(zb_planner* planner, int32_t* rows, int64_t tries, double heat, int64_t seed) {
  return Refiner(planner->problem, planner->line, static_cast<uint64_t>(seed)).run(rows, tries, heat);
}

}  // extern "C"
