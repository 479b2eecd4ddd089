#include <signal.h>

#include <algorithm>
#include <climits>
#include <string_view>

#include <fmt/format.h>

#include <launcher/batch_system.h>
#include <launcher/cores.h>
#include <launcher/error.h>
#include <launcher/gpus.h>
#include <launcher/option_values.h>
#include <launcher/options.h>
#include <launcher/rendezvous.h>
#include <launcher/signals.h>
#include <launcher/split_arguments.h>

namespace ddp::launcher {
namespace {

constexpr int kMostNodes = 1 << 20;
constexpr int kMostWorkersPerNode = 1 << 16;
constexpr int kMostRestarts = 1 << 20;

constexpr const char* kRankPrefix = "[rank ${rank}]: ";
constexpr const char* kRolePrefix = "[${role_name}${local_rank}]:";

int workers_per_node(const OptionValues& values) {
  const OptionValues::Value* value = values.find("nproc_per_node");
  const std::string text = value != nullptr ? value->text : "";
  if (text == "cpu") return available_cores();
  if (text == "gpu" || text == "auto") {
    const Gpus gpus = find_gpus();
    if (gpus.count() > 0) return gpus.count();
    if (text == "auto") return available_cores();
    throw Error(ExitStatus::kSetup,
                fmt::format("{}=gpu: {}\nGive the number of processes, or 'cpu' or 'auto'.",
                            value->source, gpus.error));
  }
  return values.whole_number("nproc_per_node", 1, kMostWorkersPerNode, 1,
                             ", or 'gpu', 'cpu' or 'auto'");
}

struct Range {
  int least;
  int most;
};

/// N, or MIN:MAX.
Range range_of_nodes(const OptionValues& values) {
  const OptionValues::Value* value = values.find("nnodes");
  if (value == nullptr) return {1, 1};
  const auto colon = value->text.find(':');
  if (colon == std::string::npos) {
    const int number = values.whole_number("nnodes", 1, kMostNodes, 1);
    return {number, number};
  }
  const auto least = parse_whole_number(value->text.substr(0, colon), 1, kMostNodes);
  const auto most = parse_whole_number(value->text.substr(colon + 1), 1, kMostNodes);
  if (!least || !most || *least > *most) {
    usage_error(fmt::format("{} must be a number of nodes from 1, or MIN:MAX of them, not '{}'",
                            value->source, value->text));
  }
  return {*least, *most};
}

/// A number of nodes that does not change.
int number_of_nodes(const OptionValues& values) {
  const Range range = range_of_nodes(values);
  if (range.least != range.most) {
    usage_error(fmt::format(
        "{0}={1}:{2}: a number of nodes that changes while the job runs needs "
        "--rdzv_backend=c10d and --rdzv_endpoint=HOST[:PORT]\nOr give the number of nodes "
        "that there are.",
        values.find("nnodes")->source, range.least, range.most));
  }
  return range.most;
}

void read_elastic(Options& options, const Rendezvous& rendezvous, Range nodes,
                  const OptionValues& values) {
  options.elastic = rendezvous.elastic;
  options.elastic->least = nodes.least;
  options.elastic->most = nodes.most;
  options.nnodes = nodes.most;
  if (!options.elastic->host.empty() && options.elastic->port != 0) return;
  usage_error(fmt::format(
      "{}=c10d with several nodes needs --rdzv_endpoint=HOST[:PORT], the same on every "
      "node: the address of the one that serves the rendezvous, and a port that is not 0 "
      "(default: {})",
      values.find("rdzv_backend")->source, ElasticOptions().port));
}

/// Where there is one node, whatever the environment says of others.
void check_single_node(const OptionValues& values, std::string_view why) {
  if (number_of_nodes(values) != 1 || values.whole_number("node_rank", 0, kMostNodes - 1, 0) != 0) {
    usage_error(
        fmt::format("{} is for one node: leave --nnodes and --node_rank out, or for several "
                    "nodes give --master_addr=HOST instead of it",
                    why));
  }
}

/// "localhost:0" and the like, as people write it for one node.
bool is_local(const ElasticOptions& endpoint) {
  return endpoint.port == 0 || endpoint.host == "localhost" || endpoint.host == "::1" ||
         endpoint.host.starts_with("127.");
}

/// For c10d the batch system's word takes the place of what was not given: the number of nodes, and
/// the first of them as the one that serves the rendezvous.
void add_batch_job(Rendezvous& rendezvous, Range& nodes, const OptionValues& values,
                   const VariableLookup& variables) {
  const bool asked = values.find("nnodes") != nullptr;
  ElasticOptions& elastic = rendezvous.elastic;
  const bool has_endpoint = !elastic.host.empty();
  if (asked ? nodes.most == 1 : has_endpoint && is_local(elastic)) return;
  const auto batch = read_batch_job(variables);
  if (!batch || batch->nnodes == 1) return;
  if (asked && (batch->nnodes < nodes.least || batch->nnodes > nodes.most)) return;
  if (!asked) nodes = {batch->nnodes, batch->nnodes};
  if (rendezvous.run_id.empty()) rendezvous.run_id = batch->run_id;
  if (has_endpoint || batch->master_addr.empty()) return;
  elastic.host = batch->master_addr;
  if (batch->master_port != 0) elastic.port = static_cast<uint16_t>(batch->master_port);
  // The batch system knows it better than the name service, which may call the node itself
  // something else.
  if (!elastic.is_host) elastic.is_host = batch->node_rank == 0;
}

void read_nodes(Options& options, const OptionValues& values, const VariableLookup& variables) {
  Rendezvous rendezvous = read_rendezvous(values);
  options.run_id = rendezvous.run_id;
  options.resolve_patience = rendezvous.patience;
  if (values.flag("standalone")) {
    check_single_node(values, values.find("standalone")->source);
    options.run_id.clear();
    return;
  }
  if (rendezvous.c10d) {
    // Node ranks and the master are agreed on: what is given of them, often by a cluster, is void.
    Range nodes = range_of_nodes(values);
    add_batch_job(rendezvous, nodes, values, variables);
    options.run_id = rendezvous.run_id;
    if (nodes.most > 1) {
      read_elastic(options, rendezvous, nodes, values);
      return;
    }
    check_single_node(values, "--rdzv_backend=c10d");
    return;
  }

  options.nnodes = number_of_nodes(values);
  options.node_rank = values.whole_number("node_rank", 0, kMostNodes - 1, 0);
  options.master_addr = rendezvous.master_addr;
  options.master_port = rendezvous.master_port;
  const bool asked = values.find("nnodes") != nullptr;
  if (asked ? options.nnodes == 1 : values.find("node_rank") != nullptr) return;
  const auto batch = read_batch_job(variables);
  if (!batch || (asked && batch->nnodes != options.nnodes)) return;
  options.nnodes = batch->nnodes;
  if (options.nnodes == 1) return;
  if (values.find("node_rank") == nullptr) options.node_rank = batch->node_rank;
  if (options.master_addr.empty()) options.master_addr = batch->master_addr;
  if (options.master_port == 0) options.master_port = batch->master_port;
  if (options.run_id.empty()) options.run_id = batch->run_id;
}

void check_nodes(const Options& options) {
  if (options.node_rank >= options.nnodes) {
    usage_error(
        fmt::format("--node_rank={} is out of range: with --nnodes={} node ranks go from 0 to {}",
                    options.node_rank, options.nnodes, options.nnodes - 1));
  }
  if (static_cast<long long>(options.nnodes) * options.nproc_per_node > INT_MAX) {
    usage_error(
        fmt::format("--nnodes={} times --nproc_per_node={} is more processes than a rank can count",
                    options.nnodes, options.nproc_per_node));
  }
  if (options.nnodes > 1 && !options.elastic && options.master_addr.empty()) {
    usage_error(fmt::format(
        "--nnodes={} needs --master_addr=HOST: the address of node 0, the same on every "
        "node",
        options.nnodes));
  }
}

void read_program(Options& options, const OptionValues& values, std::string_view called) {
  options.use_env = values.flag("use_env") || called.substr(called.rfind('/') + 1) == "ddprun";
  options.module = values.flag("module");
  options.no_python = values.flag("no_python");
  options.run_path = values.flag("run_path");
  for (const char* python : {"module", "run_path"}) {
    if (options.no_python && values.flag(python)) {
      usage_error(
          fmt::format("--no_python and --{} contradict each other: give one of them", python));
    }
  }
  options.role = values.text("role", options.role);
  options.virtual_local_rank = values.flag("virtual_local_rank");
  options.tune_malloc = values.flag("tune_malloc");
  if (const auto* numa = values.find("numa_binding")) {
    options.numa_binding = numa_binding(numa->text);
    if (options.numa_binding == NumaBinding::kNone) {
      usage_error(
          fmt::format("{} must be 'node', 'socket', 'exclusive' or 'core-complex', not '{}'",
                      numa->source, numa->text));
    }
  }
}

StreamMask stream_mask(const OptionValues& values, std::string_view name, int workers) {
  const OptionValues::Value* value = values.find(name);
  if (value == nullptr) return {};
  StreamMask mask(value->text, value->source);
  if (mask.highest_rank() >= workers) {
    usage_error(fmt::format("{}={} names local rank {}, and they go from 0 to {}", value->source,
                            value->text, mask.highest_rank(), workers - 1));
  }
  return mask;
}

void read_output(Options& options, const OptionValues& values, const VariableLookup& variables) {
  options.log_dir = values.text("log_dir");
  options.redirects = stream_mask(values, "redirects", options.nproc_per_node);
  options.tee = stream_mask(values, "tee", options.nproc_per_node);
  if (options.redirects.any() && options.log_dir.empty()) {
    usage_error(fmt::format("{} needs --log_dir=FOLDER: where the files go",
                            values.find("redirects")->source));
  }
  if (const auto* visible = values.find("local_ranks_filter")) {
    options.visible = parse_local_ranks(visible->text, visible->source);
    if (!options.visible->empty() && *options.visible->rbegin() >= options.nproc_per_node) {
      usage_error(fmt::format("{}={} names local rank {}, and they go from 0 to {}",
                              visible->source, visible->text, *options.visible->rbegin(),
                              options.nproc_per_node - 1));
    }
  }

  const std::string form = values.text("line_prefix");
  const char* from_torchrun = variables("TORCHELASTIC_LOG_LINE_PREFIX_TEMPLATE");
  options.prefix_all = !form.empty() && form != "none";
  if (form == "rank") {
    options.line_prefix = kRankPrefix;
  } else if (form == "role") {
    options.line_prefix = kRolePrefix;
  } else if (!form.empty()) {
    options.line_prefix = form == "none" ? "" : form;
  } else {
    options.line_prefix = from_torchrun != nullptr ? from_torchrun : kRankPrefix;
  }
}

void read_ending(Options& options, const OptionValues& values) {
  options.max_restarts = values.whole_number("max_restarts", 0, kMostRestarts, 0);
  options.grace_period = values.seconds("grace_period").value_or(options.grace_period);
  options.timeout = values.seconds("timeout");
  if (options.timeout && options.timeout->count() == 0)
    usage_error(fmt::format("{} must be more than 0 seconds", values.find("timeout")->source));
  if (const auto* names = values.find("signals_to_handle")) {
    options.ending_signals.clear();
    for (const std::string_view name : split_at_commas(names->text)) {
      const int signal = signal_number(name);
      if (signal == 0 || !may_be_handled(signal)) {
        usage_error(
            fmt::format("{}: '{}' is no signal that can be handled; for example "
                        "SIGTERM,SIGINT,SIGHUP,SIGQUIT,SIGUSR1,SIGUSR2",
                        names->source, name));
      }
      options.ending_signals.insert(signal);
    }
  }
}

void check_accepted(const OptionValues& values) {
  values.seconds("monitor_interval");
  const std::string method = values.text("start_method", "spawn");
  if (method != "spawn" && method != "fork" && method != "forkserver") {
    usage_error(fmt::format("{} must be spawn, fork or forkserver, not '{}'",
                            values.find("start_method")->source, method));
  }
}

}  // namespace

Options::Options() : ending_signals{SIGTERM, SIGINT, SIGHUP, SIGQUIT} {}

Options parse_options(std::span<const char* const> argv, const VariableLookup& variables) {
  SplitArguments split = split_arguments(argv.subspan(std::min<size_t>(1, argv.size())));
  const OptionValues values(split.options, variables);

  Options options;
  options.help = values.flag("help");
  options.version = values.flag("version");
  if (options.help || options.version) return options;

  options.nproc_per_node = workers_per_node(values);
  read_nodes(options, values, variables);
  check_nodes(options);
  options.local_addr = values.text("local_addr");
  read_program(options, values, argv.empty() ? "" : argv.front());
  read_output(options, values, variables);
  read_ending(options, values);
  check_accepted(values);
  options.dry_run = values.flag("dry_run");

  options.command = std::move(split.command);
  if (options.command.empty()) {
    usage_error(
        "no program given\nUsage: launch [options] program [its arguments]; see launch --help");
  }
  return options;
}

}  // namespace ddp::launcher
