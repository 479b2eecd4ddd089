#include <string_view>

#include <fmt/format.h>

#include <launcher/command.h>
#include <launcher/program.h>

namespace ddp::launcher {
namespace {

bool is_python_script(std::string_view name) {
  return name.size() > 3 && name.substr(name.size() - 3) == ".py";
}

}  // namespace

std::vector<std::string> Command::for_rank(int local_rank) const {
  std::vector<std::string> all = words;
  if (!rank_option.empty()) {
    all.insert(all.begin() + static_cast<std::ptrdiff_t>(rank_at),
               fmt::format("{}{}", rank_option, local_rank));
  }
  return all;
}

Command make_command(const Options& options, const VariableLookup& variables) {
  Command command;
  const std::string& program = options.command.front();
  const bool python =
      options.module || options.run_path || (!options.no_python && is_python_script(program));
  if (python) {
    const char* chosen = variables("PYTHON_EXEC");
    const std::string interpreter = chosen != nullptr && *chosen != '\0' ? chosen : "python3";
    if (!options.module) check_script(program);
    command.path = find_program(interpreter);
    command.words = {interpreter, "-u"};
    if (options.module) command.words.emplace_back("-m");
  } else {
    command.path = find_program(program);
  }
  command.words.insert(command.words.end(), options.command.begin(), options.command.end());
  if (!options.use_env) {
    command.rank_option = python ? "--local-rank=" : "--local_rank=";
    command.rank_at = command.words.size() - options.command.size() + 1;
  }
  return command;
}

}  // namespace ddp::launcher
