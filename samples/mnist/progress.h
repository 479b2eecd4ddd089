#pragma once

#include <cstddef>
#include <string>

/// Whether this process writes to a terminal.
bool stdout_is_terminal();

/// A bar on the terminal's last line that grows with the steps of an epoch; `finish` takes it away.
class ProgressBar {
 public:
  ProgressBar(std::string title, std::size_t steps) : title_(std::move(title)), steps_(steps) {}

  void advance();
  void finish();

 private:
  std::string title_;
  std::size_t steps_;
  std::size_t done_ = 0;
};
