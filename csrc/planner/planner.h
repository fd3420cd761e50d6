// The loops for one problem, with their working memory.
#pragma once

#include <algorithm>
#include <cstdint>
#include <memory>
#include <mutex>
#include <optional>
#include <utility>
#include <vector>

#include "check.h"
#include "compact.h"
#include "problem.h"
#include "refill.h"
#include "refine.h"
#include "timeline.h"

namespace zb {

using Rows = std::vector<std::vector<int>>;

// The properties that rows and a problem must share.
struct Layout {
  std::vector<int> rank;
  int num_microbatches;
  std::vector<int> begin;

  explicit Layout(const Problem& p) : rank(p.rank), num_microbatches(p.num_microbatches), begin(row_begins(p)) {}

  bool operator==(const Layout& other) const {
    return rank == other.rank && num_microbatches == other.num_microbatches;
  }
};

// The rows of all ranks in one array; only a planner makes them, so that they always match their layout.
class PackedRows {
 private:
  friend class Planner;
  PackedRows(std::shared_ptr<const Layout> layout, std::vector<int32_t> codes)
      : layout(std::move(layout)), codes(std::move(codes)) {}

  std::shared_ptr<const Layout> layout;
  std::vector<int32_t> codes;
};

// Thread-safe: concurrent calls are serialized.
class Planner {
 public:
  Planner(Problem forward, Problem mirrored)
      : problem(checked(std::move(forward))),
        reverse(checked(std::move(mirrored))),
        layout(std::make_shared<const Layout>(problem)),
        unlimited(problem.num_stages, problem.num_microbatches),
        line(problem),
        compactor(problem),
        reverse_compactor(reverse),
        refiller(problem) {
    require(*layout == Layout(reverse), "a problem and its mirror must have the same ranks and microbatches");
  }

  PackedRows pack(const Rows& rows) const {
    const int num_codes = 3 * problem.num_stages, m = problem.num_microbatches;
    require(
        static_cast<int>(rows.size()) == problem.num_ranks, "rows are needed for ", problem.num_ranks, " ranks; got ",
        rows.size());
    std::vector<int> count(num_codes, 0);
    std::vector<int32_t> codes;
    codes.reserve(layout->begin.back());
    for (int r = 0; r < problem.num_ranks; ++r)
      for (int code : rows[r]) {
        require(
            0 <= code && code < num_codes && problem.rank[code] == r, "the row of rank ", r,
            " must have codes of its stages; got ", code);
        ++count[code];
        codes.push_back(code);
      }
    for (int c = 0; c < num_codes; ++c)
      require(count[c] == m, "rows must have each code ", m, " times; got code ", c, " ", count[c], " times");
    return {layout, std::move(codes)};
  }

  Rows unpack(const PackedRows& rows) const {
    check(rows);
    Rows result;
    for (int r = 0; r < problem.num_ranks; ++r)
      result.emplace_back(rows.codes.begin() + layout->begin[r], rows.codes.begin() + layout->begin[r + 1]);
    return result;
  }

  // Returns the cost of rows and its mean over ranks; infinity if infeasible.
  std::pair<double, double> evaluate(const PackedRows& rows) {
    check(rows);
    const std::lock_guard turn(mutex);
    const Cost found = line.evaluate(rows.codes.data());
    return {found.cost, found.mean};
  }

  // Returns the start of every pass; none if the rows deadlock.
  std::optional<std::vector<std::vector<double>>> starts(const PackedRows& rows) {
    check(rows);
    const std::lock_guard turn(mutex);
    line.fits(rows.codes.data());
    if (!line.run(rows.codes.data())) return std::nullopt;
    std::vector<std::vector<double>> result;
    for (int r = 0; r < problem.num_ranks; ++r)
      result.emplace_back(line.starts.begin() + layout->begin[r], line.starts.begin() + layout->begin[r + 1]);
    return result;
  }

  // Returns denser rows; none if they deadlock or do not fit.
  std::optional<PackedRows> compact(
      const PackedRows& rows, const std::optional<std::vector<int>>& most_held, double haste, bool backwards) {
    check(rows);
    const std::vector<int>& held = most_held ? *most_held : unlimited;
    require(
        held.size() == unlimited.size(), "most_held must be one number for each of the ", unlimited.size(),
        " stages; got ", held.size());
    const std::lock_guard turn(mutex);
    PackedRows result = rows;
    if (backwards) mirror(result.codes);
    Compactor& chosen = backwards ? reverse_compactor : compactor;
    if (!chosen.run(result.codes.data(), held.data(), haste, backwards)) return std::nullopt;
    if (backwards) mirror(result.codes);
    return result;
  }

  // Returns rows with their W passes in other places; none if they deadlock or do not fit.
  std::optional<PackedRows> refill(const PackedRows& rows, const Eagerness& eagerness, double target) {
    check(rows);
    const std::lock_guard turn(mutex);
    PackedRows result(layout, std::vector<int32_t>(rows.codes.size()));
    if (!refiller.run(rows.codes.data(), eagerness, target, result.codes.data())) return std::nullopt;
    return result;
  }

  // Returns the best cost found by local search, and its rows.
  std::pair<double, PackedRows> refine(const PackedRows& rows, int64_t tries, double heat, uint64_t seed) {
    check(rows);
    const std::lock_guard turn(mutex);
    PackedRows result = rows;
    const double cost = Refiner(problem, line, seed).run(result.codes.data(), tries, heat);
    return {cost, std::move(result)};
  }

 private:
  void check(const PackedRows& rows) const {
    require(
        rows.layout == layout || *rows.layout == *layout,
        "these rows were packed for other ranks, stages or microbatches; pack them for this problem");
  }

  // Reverses rows in time.
  void mirror(std::vector<int32_t>& codes) const {
    const std::vector<int>& begin = layout->begin;
    for (size_t r = 0; r + 1 < begin.size(); ++r)
      std::reverse(codes.begin() + begin[r], codes.begin() + begin[r + 1]);
    for (int32_t& code : codes) {
      const int kind = code % 3;
      code += kind == kForward ? 1 : kind == kBackward ? -1 : 0;
    }
  }

  const Problem problem, reverse;
  const std::shared_ptr<const Layout> layout;
  const std::vector<int> unlimited;
  std::mutex mutex;
  Timeline line;
  Compactor compactor, reverse_compactor;
  Refiller refiller;
};

}  // namespace zb
