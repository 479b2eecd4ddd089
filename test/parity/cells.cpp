#include <algorithm>
#include <fstream>
#include <map>
#include <sstream>
#include <stdexcept>
#include <test/parity/cells.h>
#include <utility>

namespace ddp::parity {
namespace {

/// The `key=value` words of a line; each must be taken.
class Settings {
 public:
  explicit Settings(std::istream& words) {
    for (std::string word; words >> word;) {
      const auto equals = word.find('=');
      if (equals == std::string::npos) {
        throw std::invalid_argument("expected key=value, found " + word);
      }
      values_[word.substr(0, equals)] = word.substr(equals + 1);
    }
  }

  std::optional<std::string> take(const std::string& key) {
    const auto entry = values_.find(key);
    if (entry == values_.end()) {
      return std::nullopt;
    }
    auto value = std::move(entry->second);
    values_.erase(entry);
    return value;
  }

  std::optional<bool> take_flag(const std::string& key) {
    const auto value = take(key);
    if (value && *value != "0" && *value != "1") {
      throw std::invalid_argument(key + " is " + *value + "; expected 0 or 1");
    }
    return value ? std::optional(*value == "1") : std::nullopt;
  }

  std::optional<double> take_number(const std::string& key) {
    const auto value = take(key);
    return value ? std::optional(std::stod(*value)) : std::nullopt;
  }

  void expect_none_left() const {
    if (!values_.empty()) {
      throw std::invalid_argument("unknown setting " + values_.begin()->first);
    }
  }

 private:
  std::map<std::string, std::string> values_;
};

Cell read_cell(const std::string& line) {
  std::istringstream words(line);
  Cell cell;
  words >> cell.name;
  Settings settings(words);
  cell.model = settings.take("model").value();
  if (const auto spare = settings.take("spare")) {
    if (*spare != "never" && *spare != "some_ranks") {
      throw std::invalid_argument("spare is " + *spare);
    }
    cell.spare = *spare == "never" ? Spare::kNever : Spare::kSomeRanks;
  }
  cell.micro_batches = static_cast<int>(settings.take_number("accumulate").value_or(1));
  cell.set_to_none = settings.take_flag("set_to_none").value_or(true);
  cell.momentum = settings.take_number("momentum").value();
  cell.weight_decay = settings.take_number("weight_decay").value_or(0);
  cell.find_unused_parameters = settings.take_flag("find_unused_parameters").value_or(false);
  cell.static_graph = settings.take_flag("static_graph").value_or(false);
  cell.python_compatible = settings.take_flag("python_compatible").value_or(false);
  cell.gradient_as_bucket_view = settings.take_flag("gradient_as_bucket_view");
  cell.bucket_cap_mb = settings.take_number("bucket_cap_mb");
  cell.hook = settings.take("hook").value_or("");
  cell.low_rank = static_cast<int>(settings.take_number("low_rank").value_or(1));
  cell.warm_start = settings.take_flag("warm_start").value_or(true);
  cell.averaging = static_cast<int>(settings.take_number("averaging").value_or(0));
  cell.subgroups = settings.take_flag("subgroups").value_or(false);
  cell.evaluate = settings.take_flag("evaluate").value_or(false);
  if (const auto join = settings.take("join")) {
    if (*join != "initial" && *join != "active") {
      throw std::invalid_argument("join is " + *join);
    }
    cell.join = *join == "initial" ? Join::kInitial : Join::kActive;
  }
  settings.expect_none_left();
  return cell;
}

}  // namespace

Plan read_plan(const std::string& path) {
  std::ifstream file(path);
  std::string line;
  if (!std::getline(file, line)) {
    throw std::invalid_argument("no plan at " + path);
  }
  std::istringstream words(line);
  Settings settings(words);
  Plan plan;
  plan.steps = static_cast<int>(settings.take_number("steps").value());
  plan.learning_rate = settings.take_number("learning_rate").value();
  plan.python_compatible = settings.take_flag("python_compatible").value_or(false);
  settings.expect_none_left();
  while (std::getline(file, line)) {
    plan.cells.push_back(read_cell(line));
  }
  return plan;
}

int steps_of(Join join, int steps, int rank, int world_size) {
  if (join == Join::kNone || rank == world_size - 1) {
    return steps;
  }
  return rank == 1 ? 1 : std::max(1, steps - 4 * (rank + 1));
}

bool spare_is_used(Spare spare, int rank, int step) {
  return spare == Spare::kSomeRanks && step % 5 != 4 && (rank + step) % 2 == 0;
}

}  // namespace ddp::parity
