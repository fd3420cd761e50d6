// Controls of the fake cuBLASLt, also for Python's ctypes.

#pragma once

#include <cstdint>

enum Fault : int {
  kNone,
  kNoBiasKernel,      // the heuristic finds no kernel that sums the bias
  kBiasRefused,       // the heuristic finds one, but the library refuses to queue it
  kEverythingRefused,
  kNothingFound,
  kExecutionFails,
};

extern "C" {
// From now on, calls go wrong like this.
void fake_set_fault(int fault);
// How many products the library was asked to queue, refused ones included.
int fake_num_calls();
// The alignments of A, B, C and D that the heuristic was given for the last product.
void fake_get_alignments(uint32_t* four);
// Whether the last product had operands rounded to TensorFloat-32.
int fake_was_tf32();
}
