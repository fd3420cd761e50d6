// The hot loops of the schedule search: decode, compact and local search over rows of passes.
//
// Each does, operation by operation, what its namesake in megatron/zero_bubble/search does, so that both give the same
// numbers to the last bit (build without fused multiply-add); the Python is the reference and says why. Plain C
// interface, no Python headers: any host can load it.
//
// A row holds codes 3 * stage + kind (0 F, 1 B, 2 W); the n-th of a code is for microbatch n. The rows of all ranks lie
// one behind the other: "rows" have 2 m codes a stage of the rank (F and B), "full" ones 3 m (with W).

#include <algorithm>
#include <cstdint>
#include <functional>
#include <limits>
#include <queue>
#include <utility>
#include <vector>

namespace {

constexpr int kNone = -1;
constexpr int kForward = 0, kBackward = 1, kWgrad = 2;
constexpr double kSlack = 1e-9;
constexpr double kMoveSlack = 1e-6;
constexpr double kMeanWeight = 0.02;
constexpr int kReach = 8;
constexpr int kLookAhead = 24, kFullLookAhead = 36;
constexpr double kNever = std::numeric_limits<double>::infinity();

}  // namespace

extern "C" {

// One scheduling problem; arrays of ints and doubles by code, or by rank (limit, work, origin).
struct zb_problem {
  int32_t num_ranks, num_stages, num_microbatches;
  const int32_t* rank;
  const int32_t* source;
  const int32_t* receiver;
  const double* duration;
  const double* hop;
  const double* delta;
  const double* limit;
  const double* work;
  const double* origin;
};

}  // extern "C"

namespace {

// Where each rank's row begins.
std::vector<int> offsets(const zb_problem& p, int passes_a_stage) {
  std::vector<int> begin(p.num_ranks + 1, 0);
  for (int s = 0; s < p.num_stages; ++s) begin[p.rank[3 * s] + 1] += passes_a_stage * p.num_microbatches;
  for (int r = 0; r < p.num_ranks; ++r) begin[r + 1] += begin[r];
  return begin;
}

struct Cost {
  double cost = kNever, mean = kNever;
};

// search/decode.py. Keeps its buffers, because local search calls it for every move.
class Decoder {
 public:
  explicit Decoder(const zb_problem& problem)
      : p(problem),
        m(problem.num_microbatches),
        from(offsets(problem, 2)),
        to(offsets(problem, 3)),
        ends(3 * problem.num_stages * m),
        count(3 * problem.num_stages),
        position(problem.num_ranks),
        placed(problem.num_ranks),
        waits_for(problem.num_ranks),
        free_at(problem.num_ranks),
        kept(problem.num_ranks),
        spare(problem.num_ranks),
        first_pending(problem.num_ranks),
        last_pending(problem.num_ranks),
        pending(to[problem.num_ranks] / 3) {}

  Cost run(const int32_t* rows, double eagerness, double target, int32_t* full) {
    std::fill(count.begin(), count.end(), 0);
    runnable.clear();
    for (int r = 0; r < p.num_ranks; ++r) {
      free_at[r] = kept[r] = 0.0;
      position[r] = from[r];
      placed[r] = to[r];
      first_pending[r] = last_pending[r] = to[r] / 3;
      waits_for[r] = kNone;
      spare[r] = target + p.origin[r] - p.work[r];
      runnable.push_back(r);
    }
    while (!runnable.empty()) {
      const int rank = runnable.back();
      runnable.pop_back();
      if (!advance(rank, rows, eagerness, full)) return {};
    }
    Cost result{-kNever, 0.0};
    for (int r = 0; r < p.num_ranks; ++r) {
      if (position[r] < from[r + 1]) return {};
      double rest = 0.0;
      for (int i = first_pending[r]; i < last_pending[r]; ++i) {
        full[placed[r]++] = pending[i];
        rest += p.duration[pending[i]];
      }
      const double cost = free_at[r] + rest - p.origin[r];
      result.cost = std::max(result.cost, cost);
      result.mean += cost;
    }
    result.mean /= p.num_ranks;
    return result;
  }

 private:
  // Runs one rank until a pass's input is missing; false when memory does not suffice.
  bool advance(int rank, const int32_t* rows, double eagerness, int32_t* full) {
    double now = free_at[rank], held = kept[rank];
    const double limit = p.limit[rank];
    int& head = first_pending[rank];
    int& tail = last_pending[rank];
    int& out = placed[rank];
    auto run_wgrad = [&] {
      const int wgrad = pending[head++];
      full[out++] = wgrad;
      now += p.duration[wgrad];
      held += p.delta[wgrad];
    };
    int at = position[rank];
    for (; at < from[rank + 1]; ++at) {
      const int code = rows[at], source = p.source[code], n = count[code];
      double arrival = p.hop[code];
      if (source != kNone) {
        if (n >= count[source]) {
          waits_for[rank] = source;
          break;
        }
        arrival = ends[source * m + n] + p.hop[code];
      }
      const double change = p.delta[code];
      while (head < tail && (now + p.duration[pending[head]] <= arrival + kSlack || (change > 0 && held + change > limit)))
        run_wgrad();
      held += change;
      if (change > 0 && held > limit) return false;
      if (arrival > now) {
        const double gap = arrival - now;
        if (head < tail && (gap > eagerness * p.duration[pending[head]] || gap > spare[rank] + kSlack)) run_wgrad();
        if (arrival > now) {
          spare[rank] -= arrival - now;
          now = arrival;
        }
      }
      full[out++] = code;
      now += p.duration[code];
      ends[code * m + n] = now;
      count[code] = n + 1;
      if (code % 3 == kBackward) pending[tail++] = code + 1;
      const int other = p.receiver[code];
      if (other != kNone && waits_for[other] == code) {
        waits_for[other] = kNone;
        runnable.push_back(other);
      }
    }
    position[rank] = at;
    free_at[rank] = now;
    kept[rank] = held;
    return true;
  }

  const zb_problem& p;
  const int m;
  const std::vector<int> from, to;
  std::vector<double> ends;
  std::vector<int> count, position, placed, waits_for;
  std::vector<double> free_at, kept, spare;
  std::vector<int> first_pending, last_pending, pending, runnable;
};

// search/compact.py.
class Compactor {
 public:
  Compactor(const zb_problem& problem, int32_t* rows, const int32_t* most_held, double haste)
      : p(problem),
        m(problem.num_microbatches),
        rows(rows),
        most_held(most_held),
        haste(haste),
        begin(offsets(problem, 2)),
        arrivals(3 * problem.num_stages * m),
        arrived(3 * problem.num_stages, 0),
        count(3 * problem.num_stages, 0),
        kept(problem.num_ranks, 0.0),
        position(begin.begin(), begin.end() - 1),
        pending(problem.num_ranks),
        first_pending(problem.num_ranks, 0),
        codes(problem.num_ranks),
        settled(3 * problem.num_stages) {
    for (int n = 0; n < m; ++n) arrivals[n] = 0.0;
    arrived[kForward] = m;
    for (int s = 0; s < p.num_stages; ++s)
      for (int kind : {kForward, kBackward}) codes[p.rank[3 * s]].push_back(3 * s + kind);
    for (int c = 0; c < 3 * p.num_stages; ++c) settled[c] = p.delta[c] + (c % 3 == kBackward ? p.delta[c + 1] : 0.0);
  }

  bool finish() {
    const int turn = 3 * (p.num_stages - 1);
    std::vector<double> free_at(p.num_ranks, 0.0);
    std::priority_queue<Event, std::vector<Event>, std::greater<Event>> events;
    for (int r = 0; r < p.num_ranks; ++r) events.push({0.0, r});
    while (!events.empty()) {
      const auto [now, rank] = events.top();
      events.pop();
      if (now < free_at[rank]) continue;
      const int at = position[rank];
      int code = kNone;
      double soon = kNever;
      if (at < begin[rank + 1]) {
        const int head = rows[at];
        if (count[head] < arrived[head]) soon = arrivals[head * m + count[head]];
        if (soon > now + kSlack)
          code = overtake(rank, now, soon);
        else if (p.delta[head] <= 0 || kept[rank] + p.delta[head] <= p.limit[rank])
          code = head;
        else
          soon = kNever;  // until a W has freed memory
      }
      std::vector<int>& waiting = pending[rank];
      int& first = first_pending[rank];
      if (code == kNone && first < static_cast<int>(waiting.size()) && now + p.duration[waiting[first]] <= soon + kSlack)
        code = waiting[first++];
      if (code == kNone) {
        if (soon < kNever) events.push({soon, rank});
        continue;
      }
      const double end = now + p.duration[code];
      free_at[rank] = end;
      events.push({end, rank});
      kept[rank] += p.delta[code];
      const int kind = code % 3;
      if (kind == kWgrad) continue;
      ++count[code];
      ++position[rank];
      if (kind == kBackward) waiting.push_back(code + 1);
      const int follower = kind == kBackward ? code - 3 : code < turn ? code + 3 : code + 1;
      if (follower < 0) continue;
      const double arrival = end + p.hop[follower];
      arrivals[follower * m + arrived[follower]++] = arrival;
      const int other = p.rank[follower];
      if (other != rank && free_at[other] <= arrival) events.push({arrival, other});
    }
    for (int r = 0; r < p.num_ranks; ++r)
      if (position[r] < begin[r + 1]) return false;
    return true;
  }

 private:
  using Event = std::pair<double, int>;

  int overtake(int rank, double now, double soon) {
    const double latest = now + kSlack, deadline = soon + kSlack, late = 1.0 - haste;
    ready.clear();
    for (int code : codes[rank]) {
      const int n = count[code];
      const bool on_time =
          n < arrived[code] && arrivals[code * m + n] <= latest && now + late * p.duration[code] <= deadline;
      if (on_time && (code % 3 == kBackward || n - count[code + 1] < most_held[code / 3])) ready.push_back(code);
    }
    if (ready.empty()) return kNone;
    const int at = position[rank];
    double freed = 0.0;
    for (int i = first_pending[rank]; i < static_cast<int>(pending[rank].size()); ++i) freed += p.delta[pending[rank][i]];
    double held = kept[rank] + freed + settled[rows[at]];
    double peak = std::max(held, kept[rank]);
    const int last = std::min(at + 1 + kLookAhead, begin[rank + 1]);
    for (int place = at + 1; place < last; ++place) {
      const int code = rows[place];
      const auto found = std::find(ready.begin(), ready.end(), code);
      if (found != ready.end()) {
        if (code % 3 == kBackward || peak + p.delta[code] <= p.limit[rank]) {
          std::rotate(rows + at, rows + place, rows + place + 1);
          return code;
        }
        ready.erase(found);
      }
      held += settled[code];
      peak = std::max(peak, held);
    }
    return kNone;
  }

  const zb_problem& p;
  const int m;
  int32_t* rows;
  const int32_t* most_held;
  const double haste;
  const std::vector<int> begin;
  std::vector<double> arrivals;
  std::vector<int> arrived, count;
  std::vector<double> kept;
  std::vector<int> position;
  std::vector<std::vector<int>> pending;
  std::vector<int> first_pending;
  std::vector<std::vector<int>> codes;
  std::vector<double> settled;
  std::vector<int> ready;
};

// search/compact.py: compact_full.
class FullCompactor {
 public:
  // backwards: the problem is a mirrored one, where a W comes before its F.
  FullCompactor(const zb_problem& problem, int32_t* full, const int32_t* most_held, double haste, bool backwards)
      : p(problem),
        m(problem.num_microbatches),
        rows(full),
        most_held(most_held),
        late(1.0 - haste),
        backwards(backwards),
        begin(offsets(problem, 3)),
        delta(problem.delta, problem.delta + 3 * problem.num_stages),
        landed(problem.num_stages * m),
        num_landed(problem.num_stages, 0),
        arrivals(3 * problem.num_stages * m),
        arrived(3 * problem.num_stages, 0),
        count(3 * problem.num_stages, 0),
        kept(problem.num_ranks, 0.0),
        position(begin.begin(), begin.end() - 1),
        codes(problem.num_ranks) {
    if (backwards) {
      std::fill(landed.begin(), landed.begin() + m, 0.0);
      num_landed[0] = m;
      for (int s = 0; s < p.num_stages; ++s) {
        const double whole = p.delta[3 * s], wgrad = -p.delta[3 * s + kWgrad];
        delta[3 * s] = whole - wgrad;
        delta[3 * s + kBackward] = -whole;
        delta[3 * s + kWgrad] = wgrad;
        arrived[3 * s + kWgrad] = m;
        std::fill_n(arrivals.begin() + (3 * s + kWgrad) * m, m, 0.0);
      }
    } else {
      std::fill(arrivals.begin(), arrivals.begin() + m, 0.0);
      arrived[kForward] = m;
    }
    for (int c = 0; c < 3 * p.num_stages; ++c) codes[p.rank[c]].push_back(c);
  }

  bool finish() {
    const int turn = 3 * (p.num_stages - 1);
    std::vector<double> free_at(p.num_ranks, 0.0);
    std::priority_queue<Event, std::vector<Event>, std::greater<Event>> events;
    for (int r = 0; r < p.num_ranks; ++r) events.push({0.0, r});
    while (!events.empty()) {
      const auto [now, rank] = events.top();
      events.pop();
      if (now < free_at[rank] || position[rank] == begin[rank + 1]) continue;
      const int head = rows[position[rank]];
      double soon = count[head] < arrived[head] ? arrivals[head * m + count[head]] : kNever;
      const bool fits = delta[head] <= 0 || kept[rank] + delta[head] <= p.limit[rank];
      if (!fits) soon = kNever;
      const int code = soon <= now + kSlack ? head : overtake(rank, now, soon);
      if (code == kNone) {
        if (soon < kNever) events.push({soon, rank});
        continue;
      }
      const double end = now + p.duration[code];
      free_at[rank] = end;
      events.push({end, rank});
      kept[rank] += delta[code];
      ++count[code];
      ++position[rank];
      const int kind = code % 3;
      if (!backwards && kind == kBackward) arrivals[(code + 1) * m + arrived[code + 1]++] = end;
      if (backwards && kind == kWgrad) gate(code - kWgrad, end);
      const int follower = kind == kWgrad ? kNone : kind == kBackward ? code - 3 : code < turn ? code + 3 : code + 1;
      if (follower < 0) continue;
      const double arrival = end + p.hop[follower];
      if (backwards && kind == kForward && follower % 3 == kForward) {
        landed[follower / 3 * m + num_landed[follower / 3]++] = arrival;
        gate(follower, 0.0);
      } else {
        arrivals[follower * m + arrived[follower]++] = arrival;
      }
      const int other = p.rank[follower];
      if (other != rank && free_at[other] <= arrival) events.push({arrival, other});
    }
    for (int r = 0; r < p.num_ranks; ++r)
      if (position[r] < begin[r + 1]) return false;
    return true;
  }

 private:
  using Event = std::pair<double, int>;

  // An F of a mirrored problem may start once its input has landed and its W, at ``wgrad_end``, has ended.
  void gate(int code, double wgrad_end) {
    const int n = arrived[code];
    if (n < num_landed[code / 3] && n < count[code + kWgrad])
      arrivals[code * m + arrived[code]++] = std::max(landed[code / 3 * m + n], wgrad_end);
  }

  int overtake(int rank, double now, double soon) {
    ready.clear();
    for (int code : codes[rank]) {
      const int n = count[code], kind = code % 3;
      const bool on_time = n < arrived[code] && arrivals[code * m + n] <= now + kSlack &&
                           now + late * p.duration[code] <= soon + kSlack;
      if (on_time && (kind != kForward || n - count[code + 1] < most_held[code / 3])) ready.push_back(code);
    }
    if (ready.empty()) return kNone;
    const int at = position[rank];
    double held = kept[rank], peak = held;
    const int last = std::min(at + kFullLookAhead, begin[rank + 1]);
    for (int place = at; place < last; ++place) {
      const int code = rows[place];
      const auto found = place > at ? std::find(ready.begin(), ready.end(), code) : ready.end();
      if (found != ready.end()) {
        if (delta[code] <= 0 || peak + delta[code] <= p.limit[rank]) {
          std::rotate(rows + at, rows + place, rows + place + 1);
          return code;
        }
        ready.erase(found);
      }
      held += delta[code];
      peak = std::max(peak, held);
    }
    return kNone;
  }

  const zb_problem& p;
  const int m;
  int32_t* rows;
  const int32_t* most_held;
  const double late;
  const bool backwards;
  const std::vector<int> begin;
  std::vector<double> delta, landed;
  std::vector<int> num_landed;
  std::vector<double> arrivals;
  std::vector<int> arrived, count;
  std::vector<double> kept;
  std::vector<int> position;
  std::vector<std::vector<int>> codes;
  std::vector<int> ready;
};

// search/dice.py: splitmix64 (Steele, Lea and Flood 2014).
class Dice {
 public:
  explicit Dice(uint64_t seed) : state(seed) {}

  uint64_t roll() {
    state += 0x9E3779B97F4A7C15ull;
    uint64_t z = state;
    z = (z ^ (z >> 30)) * 0xBF58476D1CE4E5B9ull;
    z = (z ^ (z >> 27)) * 0x94D049BB133111EBull;
    return z ^ (z >> 31);
  }

  double uniform() { return static_cast<double>(roll() >> 11) * 0x1.0p-53; }

  int below(int n) { return static_cast<int>(roll() % static_cast<uint64_t>(n)); }

 private:
  uint64_t state;
};

struct Move {
  int rank, origin, to;
};

// search/timeline.py and search/improve.py.
class Improver {
 public:
  // with_wgrads: the rows searched are full ones, whose W's are moved as well.
  Improver(const zb_problem& problem, bool with_wgrads)
      : p(problem),
        m(problem.num_microbatches),
        with_wgrads(with_wgrads),
        rows_begin(offsets(problem, with_wgrads ? 3 : 2)),
        full_begin(offsets(problem, 3)),
        starts(full_begin[problem.num_ranks]),
        number(full_begin[problem.num_ranks]),
        places(3 * problem.num_stages * m),
        ends(3 * problem.num_stages * m),
        count(3 * problem.num_stages),
        at(problem.num_ranks),
        waits_for(problem.num_ranks),
        free_at(problem.num_ranks),
        decoder(problem),
        dice(0) {}

  // Improves best_rows in place.
  void run(int32_t* best_rows, double& best_cost, double& best_target, double eagerness, int64_t tries, double heat) {
    std::vector<int32_t> rows(best_rows, best_rows + rows_begin[p.num_ranks]);
    std::vector<int32_t> full(full_begin[p.num_ranks]), next(full.size());
    auto cost_of = [&](double target, std::vector<int32_t>& into) {
      if (!with_wgrads) return decoder.run(rows.data(), eagerness, target, into.data());
      into = rows;
      return evaluate(rows.data());
    };
    const Cost first = cost_of(best_target, full);
    double score = first.cost + kMeanWeight * first.mean;
    int64_t used = 1;
    while (used < tries) {
      critical_moves(full.data());
      for (int i = static_cast<int>(moves.size()) - 1; i > 0; --i) std::swap(moves[i], moves[dice.below(i + 1)]);
      bool moved = false;
      for (const Move& move : moves) {
        if (used >= tries) break;
        int32_t* row = rows.data() + rows_begin[move.rank];
        shift(row, move.origin, move.to);
        const double target = best_cost - kMoveSlack;
        const Cost found = cost_of(target, next);
        ++used;
        const double threshold =
            score + heat * (1.0 - static_cast<double>(used) / static_cast<double>(tries)) * dice.uniform() - kMoveSlack;
        if (found.cost + kMeanWeight * found.mean < threshold) {
          score = found.cost + kMeanWeight * found.mean;
          full.swap(next);
          if (found.cost < best_cost - kMoveSlack) {
            best_cost = found.cost;
            best_target = target;
            std::copy(rows.begin(), rows.end(), best_rows);
          }
          moved = true;
          break;
        }
        shift(row, move.to, move.origin);
      }
      if (!moved && (heat == 0 || moves.empty())) break;
    }
  }

  // search/evaluate.py.
  Cost evaluate(const int32_t* full) {
    for (int r = 0; r < p.num_ranks; ++r) {
      double kept = 0.0;
      for (int i = full_begin[r]; i < full_begin[r + 1]; ++i) {
        const double change = p.delta[full[i]];
        kept += change;
        if (change > 0 && kept > p.limit[r]) return {};
      }
    }
    times(full);
    Cost result{-kNever, 0.0};
    for (int r = 0; r < p.num_ranks; ++r) {
      if (at[r] < full_begin[r + 1]) return {};
      const double cost = free_at[r] - p.origin[r];
      result.cost = std::max(result.cost, cost);
      result.mean += cost;
    }
    result.mean /= p.num_ranks;
    return result;
  }

 private:
  static void shift(int32_t* row, int origin, int to) {
    if (to < origin)
      std::rotate(row + to, row + origin, row + origin + 1);
    else
      std::rotate(row + origin, row + origin + 1, row + to + 1);
  }

  void times(const int32_t* full) {
    std::fill(count.begin(), count.end(), 0);
    std::vector<int> runnable;
    for (int r = 0; r < p.num_ranks; ++r) {
      at[r] = full_begin[r];
      free_at[r] = 0.0;
      waits_for[r] = kNone;
      runnable.push_back(r);
    }
    while (!runnable.empty()) {
      const int rank = runnable.back();
      runnable.pop_back();
      double now = free_at[rank];
      for (; at[rank] < full_begin[rank + 1]; ++at[rank]) {
        const int place = at[rank], code = full[place], source = p.source[code], n = count[code];
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

  void critical_moves(const int32_t* full) {
    times(full);
    moves.clear();
    double latest = -kNever;
    auto lateness = [&](int r) {
      const int last = full_begin[r + 1] - 1;
      return starts[last] + p.duration[full[last]] - p.origin[r];
    };
    for (int r = 0; r < p.num_ranks; ++r) latest = std::max(latest, lateness(r));
    std::vector<int> longest;
    for (int r = 0; r < p.num_ranks; ++r)
      if (lateness(r) > latest - kMoveSlack) longest.push_back(r);
    int rank = longest[dice.below(static_cast<int>(longest.size()))];
    int place = full_begin[rank + 1] - 1;
    block.assign(1, place);
    while (true) {
      const int code = full[place], before = p.source[code];
      const double start = starts[place];
      double arrival = -1.0;
      int other_place = 0;
      if (before != kNone) {
        other_place = places[before * m + number[place]];
        arrival = starts[other_place] + p.duration[before] + p.hop[code];
      }
      const bool follows =
          place > full_begin[rank] && starts[place - 1] + p.duration[full[place - 1]] > start - kMoveSlack;
      const bool arrives = arrival > start - kMoveSlack;
      if (follows && !(arrives && dice.uniform() < 0.5)) {
        block.push_back(--place);
        continue;
      }
      moves_in(full, rank);
      if (!arrives) return;
      rank = p.rank[before];
      place = other_place;
      block.assign(1, place);
    }
  }

  void moves_in(const int32_t* full, int rank) {
    codes.clear();
    for (auto place = block.rbegin(); place != block.rend(); ++place)
      if (with_wgrads || full[*place] % 3 != kWgrad) codes.push_back(full[*place]);
    if (codes.size() < 2) return;
    int first = 0;
    for (int place = full_begin[rank]; place < block.back(); ++place) first += with_wgrads || full[place] % 3 != kWgrad;
    const int last = static_cast<int>(codes.size()) - 1;
    for (int end : {last, last - 1})
      for (int to = end - 1; to > std::max(-1, end - kReach); --to) {
        if (codes[to] == codes[end]) break;
        moves.push_back({rank, first + end, first + to});
      }
    for (int to = 1; to < std::min(static_cast<int>(codes.size()), kReach); ++to) {
      if (codes[to] == codes[0]) break;
      moves.push_back({rank, first, first + to});
    }
  }

  const zb_problem& p;
  const int m;
  const bool with_wgrads;
  const std::vector<int> rows_begin, full_begin;
  std::vector<double> starts;
  std::vector<int> number, places;
  std::vector<double> ends;
  std::vector<int> count, at, waits_for;
  std::vector<double> free_at;
  std::vector<int> block, codes;
  std::vector<Move> moves;
  Decoder decoder;
  Dice dice;
};

}  // namespace

extern "C" {

// The cost (infinity where infeasible); *mean its mean over ranks, full the rows with W's.
double zb_decode(const zb_problem* problem, const int32_t* rows, double eagerness, double target, double* mean,
                 int32_t* full) {
  const Cost found = Decoder(*problem).run(rows, eagerness, target, full);
  *mean = found.mean;
  return found.cost;
}

// Rows run backwards in time, in place.
void zb_mirror(const zb_problem* problem, int32_t* rows, int32_t with_wgrads) {
  const std::vector<int> begin = offsets(*problem, with_wgrads ? 3 : 2);
  for (int r = 0; r < problem->num_ranks; ++r) std::reverse(rows + begin[r], rows + begin[r + 1]);
  for (int i = 0; i < begin.back(); ++i) {
    const int kind = rows[i] % 3;
    rows[i] += kind == kForward ? 1 : kind == kBackward ? -1 : 0;
  }
}

// Reorders rows in place; 0 where they deadlock or do not fit.
int32_t zb_compact(const zb_problem* problem, int32_t* rows, const int32_t* most_held, double haste) {
  return Compactor(*problem, rows, most_held, haste).finish();
}

// The same for full rows, whose W's keep their places unless they fill a gap.
int32_t zb_compact_full(const zb_problem* problem, int32_t* full, const int32_t* most_held, double haste,
                        int32_t backwards) {
  return FullCompactor(*problem, full, most_held, haste, backwards).finish();
}

// Improves rows, *cost and *target in place.
void zb_improve(const zb_problem* problem, int32_t* rows, double* cost, double* target, double eagerness, int64_t tries,
                double heat) {
  Improver(*problem, false).run(rows, *cost, *target, eagerness, tries, heat);
}

// The cost of full rows as they are, and its mean over ranks.
double zb_evaluate(const zb_problem* problem, const int32_t* full, double* mean) {
  const Cost found = Improver(*problem, true).evaluate(full);
  *mean = found.mean;
  return found.cost;
}

// Improves full rows and *cost in place, moving W's as well.
void zb_refine(const zb_problem* problem, int32_t* full, double* cost, int64_t tries, double heat) {
  double target = 0.0;
  Improver(*problem, true).run(full, *cost, target, 0.0, tries, heat);
}

}  // extern "C"
