#pragma once

#include <string>

namespace ddp::launcher {

/// Finds the program to run. A name with a slash is a path. A name without one is looked up in
/// PATH as a shell does, and, where PATH has none, in the current folder.
/// Throws Error, status 127 where there is no such file, 126 where it cannot be run.
std::string find_program(const std::string& name);

/// Throws Error where there is no such file to be read: a script for an interpreter.
void check_script(const std::string& path);

/// What to say when execve(`path`) failed with `error`, and the status to end with.
struct ExecFailure {
  int status;
  std::string text;
};
ExecFailure explain_exec_failure(const std::string& path, int error);

}  // namespace ddp::launcher
