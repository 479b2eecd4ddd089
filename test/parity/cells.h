#pragma once

#include <optional>
#include <string>
#include <vector>

namespace ddp::parity {

enum class Spare { kAbsent, kNever, kSomeRanks };
enum class Join { kNone, kInitial, kActive };

/// One cell of the matrix; cells.py says what the settings mean.
struct Cell {
  std::string name;
  std::string model;
  Spare spare = Spare::kAbsent;
  int micro_batches = 1;
  bool set_to_none = true;
  double momentum = 0;
  double weight_decay = 0;
  bool find_unused_parameters = false;
  bool static_graph = false;
  bool python_compatible = false;
  std::optional<bool> gradient_as_bucket_view;
  std::optional<double> bucket_cap_mb;
  std::string hook;
  int low_rank = 1;
  bool warm_start = true;
  int averaging = 0;
  bool subgroups = false;
  bool evaluate = false;
  Join join = Join::kNone;
};

/// Post-local SGD starts after that many steps; cells.py has the same.
constexpr int kLocalStart = 3;

struct Plan {
  int steps = 0;
  double learning_rate = 0;
  /// Some ranks of the job are Python's.
  bool python_compatible = false;
  std::vector<Cell> cells;
};

/// Reads what cells.py wrote. Throws std::invalid_argument for a setting that it does not know: a
/// cell that is run only in part would compare nothing.
Plan read_plan(const std::string& path);

/// cells.py has the same rules.
int steps_of(Join join, int steps, int rank, int world_size);
bool spare_is_used(Spare spare, int rank, int step);

}  // namespace ddp::parity
