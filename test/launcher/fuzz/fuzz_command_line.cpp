// Everything that the launcher reads before it starts anything, from arbitrary bytes: the command
// line, the environment, and the plan that --dry_run shows. Nothing is started and no name is
// looked up. Lines are the program's arguments; "$NAME=value" is a variable, a first line ":name"
// what the launcher is called, and what follows a line "!" an error file that a worker left.

#include <cstddef>
#include <cstdint>
#include <cstdlib>
#include <map>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

#include <launcher/command.h>
#include <launcher/dry_run.h>
#include <launcher/environment.h>
#include <launcher/error.h>
#include <launcher/error_file.h>
#include <launcher/gpus.h>
#include <launcher/help.h>
#include <launcher/job.h>
#include <launcher/options.h>
#include <launcher/text_template.h>

using namespace ddp::launcher;

/// In the place of the launcher's, which asks the driver in a process of its own: the linker does
/// not look for it in the library when it is here.
Gpus ddp::launcher::find_gpus() {
  Gpus gpus;
  gpus.pci_addresses = {"0000:01:00.0", "0000:02:00.0"};
  return gpus;
}

namespace {

/// A job of thousands of workers has a long plan and tells nothing more.
constexpr int kMostPlanned = 64;

struct Input {
  std::vector<std::string> words{"launch"};
  std::map<std::string, std::string> variables;
  std::string error_file;
};

Input read_input(std::string_view text) {
  Input input;
  while (!text.empty()) {
    const auto end = text.find('\n');
    // As the kernel gives them: a zero byte is their end.
    const std::string line(text.substr(0, end).substr(0, text.substr(0, end).find('\0')));
    text = end == std::string_view::npos ? std::string_view() : text.substr(end + 1);
    const auto equals = line.find('=');
    if (line == "!") {
      input.error_file = text;
      break;
    }
    if (line.starts_with(':') && input.words.size() == 1) {
      input.words[0] = line.substr(1);
    } else if (line.starts_with('$') && equals != std::string::npos) {
      input.variables[line.substr(1, equals - 1)] = line.substr(equals + 1);
    } else {
      input.words.push_back(line);
    }
  }
  return input;
}

void plan(const Input& input) {
  std::vector<const char*> words;
  for (const std::string& word : input.words) words.push_back(word.c_str());
  const auto lookup = [&](const char* name) -> const char* {
    const auto found = input.variables.find(name);
    return found != input.variables.end() ? found->second.c_str() : nullptr;
  };
  Options options = parse_options(words, lookup);
  if (options.help) {
    help_text();
    return;
  }
  if (options.version || options.nproc_per_node > kMostPlanned) return;
  Job job;
  job.command = make_command(options, lookup);
  job.placement = options.placement();
  job.run_id = options.run_id;
  job.master.address = options.master_addr;
  for (int rank = 0; rank < options.nproc_per_node; ++rank)
    expand_template(options.line_prefix,
                    {{"rank", std::to_string(rank)}, {"role_name", options.role}});
  job.options = std::move(options);

  std::vector<std::string> entries;
  std::vector<const char*> environment;
  for (const auto& [name, value] : input.variables) entries.push_back(name + "=" + value);
  for (const std::string& entry : entries) environment.push_back(entry.c_str());
  environment.push_back(nullptr);
  describe_job(job, environment.data());
}

}  // namespace

extern "C" int LLVMFuzzerTestOneInput(const std::uint8_t* data, std::size_t size) {
  const Input input = read_input({reinterpret_cast<const char*>(data), size});
  try {
    plan(input);
  } catch (const Error& error) {
    // One that says nothing, or gives the status of success, is as bad as a crash.
    if (*error.what() == '\0' || error.status() == 0) std::abort();
  }
  error_text(input.error_file);
  error_time(input.error_file);
  return 0;
}
