#pragma once

#include <string>

#include <launcher/master.h>
#include <launcher/options.h>

namespace ddp::launcher {

/// Everything that is decided before the first worker starts.
struct Job {
  Options options;
  std::string program;  ///< the path that is executed
  Master master;
};

/// Finds the program and decides where the workers meet. Throws Error.
Job prepare_job(Options options);

}  // namespace ddp::launcher
