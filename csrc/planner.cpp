// The hot loops of the schedule search for Python: time, evaluate, compact, refill and refine rows of passes, and move
// pairs.
//
// Each does, operation by operation, what its namesake in megatron/zero_bubble/core/search does, so that both give the
// same numbers to the last bit (build without fused multiply-add); the Python is the reference and says why. The types
// that Python sees are in megatron/zero_bubble/core/search/_planner.pyi; the headers in planner/ are plain C++.
//
// A row holds codes 3 * stage + kind (0 F, 1 B, 2 W); the n-th of a code is for microbatch n.

#include <pybind11/pybind11.h>
#include <pybind11/stl.h>

#include <utility>
#include <vector>

#include "planner/pairs.h"
#include "planner/planner.h"

namespace py = pybind11;
using namespace pybind11::literals;
using zb::PackedRows, zb::PairPlanner, zb::Planner, zb::Problem;

namespace {

using Codes = std::vector<int>;
using Figures = std::vector<double>;

Problem problem_of(
    int num_ranks, int num_stages, int num_microbatches, Codes rank, Codes source, Codes successor, Codes wgrad,
    Codes receiver, Figures duration, Figures hop, Figures delta, Figures limit, Figures work, Figures origin) {
  return {num_ranks, num_stages, num_microbatches, std::move(rank), std::move(source), std::move(successor),
          std::move(wgrad), std::move(receiver), std::move(duration), std::move(hop), std::move(delta),
          std::move(limit), std::move(work), std::move(origin)};
}

}  // namespace

PYBIND11_MODULE(_planner, module) {
  using without_gil = py::call_guard<py::gil_scoped_release>;

  py::class_<Problem>(module, "Problem", py::is_final())
      .def(
          py::init(&problem_of), py::kw_only(), "num_ranks"_a, "num_stages"_a, "num_microbatches"_a, "rank"_a,
          "source"_a, "successor"_a, "wgrad"_a, "receiver"_a, "duration"_a, "hop"_a, "delta"_a, "limit"_a, "work"_a,
          "origin"_a);
  py::class_<PackedRows>(module, "PackedRows", py::is_final());
  py::class_<Planner>(module, "Planner", py::is_final())
      .def(py::init<Problem, Problem>(), "problem"_a, "mirrored"_a)
      .def("pack", &Planner::pack, "rows"_a)
      .def("unpack", &Planner::unpack, "rows"_a)
      .def("evaluate", &Planner::evaluate, "rows"_a, without_gil())
      .def("starts", &Planner::starts, "rows"_a)
      .def(
          "compact", &Planner::compact, "rows"_a, "most_held"_a = py::none(), "haste"_a = 0.0, "backwards"_a = false,
          without_gil())
      .def("refill", &Planner::refill, "rows"_a, "eagerness"_a, "target"_a, without_gil())
      .def("refine", &Planner::refine, "rows"_a, "tries"_a, "heat"_a, "seed"_a, without_gil());
  py::class_<PairPlanner>(module, "PairPlanner", py::is_final())
      .def(
          py::init<int, int, int, Codes, Figures, Figures, Figures, Figures>(), py::kw_only(), "num_stages"_a,
          "num_microbatches"_a, "most_chunks"_a, "chunk"_a, "times"_a, "forward_hop"_a, "backward_hop"_a, "change"_a)
      .def(
          "improve", &PairPlanner::improve, "rows"_a, "limit"_a, "of_span"_a, "tries"_a, "seed"_a, without_gil());
}
