#include "progress.h"

#include <algorithm>
#include <cstdio>
#include <unistd.h>

namespace {

constexpr std::size_t kWidth = 40;
constexpr const char* kEraseLine = "\r\x1b[K";

}  // namespace

bool stdout_is_terminal() { return ::isatty(STDOUT_FILENO) == 1; }

void ProgressBar::advance() {
  ++done_;
  const auto filled = std::min(kWidth, done_ * kWidth / std::max<std::size_t>(steps_, 1));
  const auto bar = std::string(filled, '#') + std::string(kWidth - filled, '.');
  std::printf("%s%s [%s] %zu/%zu", kEraseLine, title_.c_str(), bar.c_str(), done_, steps_);
  std::fflush(stdout);
}

void ProgressBar::finish() {
  std::fputs(kEraseLine, stdout);
  std::fflush(stdout);
}
