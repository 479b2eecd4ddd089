#include <utility>

#include <launcher/job.h>
#include <launcher/program.h>

namespace ddp::launcher {

Job prepare_job(Options options) {
  Job job;
  job.program = find_program(options.command.front());
  job.master = choose_master(options);
  job.options = std::move(options);
  return job;
}

}  // namespace ddp::launcher
