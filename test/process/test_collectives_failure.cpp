#include <csignal>
#include <linux/sockios.h>
#include <sys/ioctl.h>
#include <test/support/catch2.h>
#include <test/support/ranks.h>
#include <thread>
#include <unistd.h>

#include <ddp/ddp.h>
#include <ddp/process_group/connections.h>
#include <ddp/process_group/group_registry.h>

// What collectives refuse before anything is sent, and what becomes of those that fail.

using ddp::ReduceOp;
using ddp::test::Rank;
using ddp::test::run_ranks;
using ddp::test::summary;
using ddp::test::Trigger;
using ddp::test::within;
using std::chrono::milliseconds;

namespace {

void start(milliseconds timeout = milliseconds(15000)) {
  ddp::init_process_group(ddp::InitProcessGroupOptions(ddp::test::backend()).timeout(timeout));
}

}  // namespace

TEST_CASE(
    "refusals name rank, function, argument, expected and found, and leave the group intact") {
  using Tensors = std::vector<at::Tensor>;
  const auto f = [] { return at::ones({4}); };
  const std::vector<std::pair<std::string, std::function<void()>>> refused = {
      {"all_reduce: the tensor is undefined", [] { ddp::all_reduce(at::Tensor()); }},
      {"all_reduce: the tensor is not dense (SparseCPU",
       [] { ddp::all_reduce(at::eye(2).to_sparse()); }},
      {"all_reduce: the tensor is not dense and contiguous (shape [4], strides [2]); pass "
       "tensor.contiguous()",
       [] { ddp::all_reduce(at::ones({8}).slice(0, 0, 8, 2)); }},
      {"all_reduce: the tensor is of dtype Short, which " + ddp::test::backend() +
           " cannot reduce with SUM",
       [] { ddp::all_reduce(at::ones({2}, at::kShort)); }},
      {"all_reduce: the tensor is of dtype ComplexFloat, which " + ddp::test::backend() +
           " cannot reduce with MAX",
       [] { ddp::all_reduce(at::ones({2}, at::kComplexFloat), ReduceOp::MAX); }},
      {"all_reduce: the tensor is of dtype Int, which " + ddp::test::backend() +
           " cannot reduce with AVG",
       [] { ddp::all_reduce(at::ones({2}, at::kInt), ReduceOp::AVG); }},
      {"all_reduce: the tensor is of dtype Float, which " + ddp::test::backend() +
           " cannot reduce with BAND",
       [] { ddp::all_reduce(at::ones({2}), ReduceOp::BAND); }},
      {"all_reduce: the tensor is a lazy conjugate",
       [] { ddp::all_reduce(at::ones({2}, at::kComplexFloat).conj()); }},
      {"broadcast: src is 2; the group has the ranks 0 to 1", [f] { ddp::broadcast(f(), 2); }},
      {"reduce: dst is -1; the group has the ranks 0 to 1", [f] { ddp::reduce(f(), -1); }},
      {"all_gather: outputs has 1 tensors; expected one for each of the 2 ranks",
       [f] { ddp::all_gather(Tensors{f()}, f()); }},
      {"all_gather: an output has the shape [3], 3 elements; expected 4 (input has the shape [4]",
       [f] {
         ddp::all_gather(Tensors{f(), at::ones({3})}, f());
       }},
      {"all_gather: an output is of dtype Double and input of Float",
       [f] {
         ddp::all_gather(Tensors{f(), at::ones({4}, at::kDouble)}, f());
       }},
      {"all_gather_into_tensor: output has the shape [4], 4 elements; expected 8",
       [f] { ddp::all_gather_into_tensor(f(), f()); }},
      {"all_gather_into_tensor: output is undefined",
       [f] { ddp::all_gather_into_tensor(at::Tensor(), f()); }},
      {"gather: outputs",
       [f] {
         ddp::gather(f(), ddp::get_rank() == 0 ? Tensors{} : Tensors{f(), f()}, 0);
       }},
      {"gather: outputs has 2 tensors; it must be empty on every rank but dst (",
       [f] {
         ddp::gather(f(), Tensors{f(), f()}, 1 - ddp::get_rank());
       }},
      {"scatter: inputs",
       [f] {
         ddp::scatter(f(), ddp::get_rank() == 1 ? Tensors{} : Tensors{f(), f()}, 1);
       }},
      {"reduce_scatter: an input has the shape [3]",
       [f] {
         ddp::reduce_scatter(f(), Tensors{f(), at::ones({3})});
       }},
      {"reduce_scatter_tensor: input has the shape [4], 4 elements; expected 8",
       [f] { ddp::reduce_scatter_tensor(f(), f()); }},
      {"all_to_all: inputs has 0 tensors",
       [f] {
         ddp::all_to_all(Tensors{f(), f()}, Tensors{});
       }},
      {"all_to_all: the tensors are of the dtypes Float and Int",
       [f] {
         ddp::all_to_all(Tensors{f(), f()}, Tensors{f(), at::ones({4}, at::kInt)});
       }},
      {"all_to_all_single: output has 3 rows, which 2 ranks do not share equally; give "
       "output_split_sizes",
       [] { ddp::all_to_all_single(at::ones({3}), at::ones({3})); }},
      {"all_to_all_single: input_split_sizes is [1, 1]; expected 2 numbers, none negative, that "
       "add up to input's 4 rows",
       [f] {
         ddp::all_to_all_single(f(), f(), ddp::AllToAllSingleOptions().input_split_sizes({1, 1}));
       }},
      {"all_to_all_single: output has rows of shape [2] and input of [3]",
       [] {
         ddp::all_to_all_single(at::ones({2, 2}), at::ones({2, 3}));
       }},
      {"all_to_all_single: output has 2 rows and input 4",
       [f] { ddp::all_to_all_single(at::ones({2}), f()); }},
      {"all_to_all_single: output and input need a dimension to be split",
       [] { ddp::all_to_all_single(at::scalar_tensor(1), at::scalar_tensor(1)); }},
      {"send: dst is this rank itself", [f] { ddp::send(f(), ddp::get_rank()); }},
      {"send: tag is -1; it must not be negative",
       [f] { ddp::send(f(), ddp::SendOptions(1 - ddp::get_rank()).tag(-1)); }},
      {"recv: src is 9", [f] { ddp::recv(f(), 9); }},
      {"monitored_barrier: timeout is -1 ms; it must be positive, or 0 for the group's",
       [] { ddp::monitored_barrier(milliseconds(-1)); }},
      {"scatter_object: objects has 1 entries; expected one for each of the 2 ranks on src (0)",
       [] { ddp::scatter_object(std::vector<std::string>{"a"}); }},
      {"async_op is not for objects",
       [] { ddp::broadcast_object(std::string(), ddp::BroadcastOptions().async_op(true)); }},
  };
  const auto results = run_ranks(2, [&](const Rank& rank) {
    start();
    for (std::size_t index = 0; index < refused.size(); ++index) {
      std::string error = "(accepted)";
      try {
        refused[index].second();
      } catch (const ddp::UsageError& refusal) {
        error = refusal.what();
      }
      rank.report("refusal" + std::to_string(index), error);
    }
    const auto tensor = at::ones({1});
    ddp::all_reduce(tensor);
    rank.report("sum", tensor.item<float>());
    ddp::destroy_process_group();
  });
  INFO(summary(results));
  for (int rank = 0; rank < 2; ++rank) {
    CHECK(results[rank].status == 0);
    CHECK(results[rank]["sum"] == "2.000000");
    for (std::size_t index = 0; index < refused.size(); ++index) {
      const auto& error = results[rank]["refusal" + std::to_string(index)];
      CHECK_THAT(error, contains(refused[index].first));
      if (refused[index].first != "async_op is not for objects") {
        CHECK_THAT(error, contains("rank " + std::to_string(rank) + ": "));
      }
    }
  }
}

TEST_CASE("refusals of one rank alone: no source, no other rank, an object that is no data") {
  const auto results = run_ranks(1, [](const Rank& rank) {
    start();
    const auto error = [&](const std::string& name, const std::function<void()>& act) {
      try {
        act();
      } catch (const ddp::UsageError& refusal) {
        rank.report(name, std::string(refusal.what()));
      }
    };
    error("source", [] { ddp::Work().source_rank(); });
    error("alone", [] { ddp::recv(at::ones({1})); });
    error("object", [] {
      const auto future = c10::make_intrusive<c10::ivalue::Future>(c10::TensorType::get());
      ddp::broadcast_object(c10::IValue(future));
    });
    ddp::destroy_process_group();
  });
  INFO(summary(results));
  CHECK(results[0].status == 0);
  CHECK_THAT(results[0]["source"], contains("source_rank: there is no work"));
  CHECK_THAT(results[0]["alone"], contains("recv: there is no other rank to receive from"));
  CHECK_THAT(results[0]["object"], contains("this object (Future) cannot be sent: "));
}

TEST_CASE(
    "over Gloo, a rank that dies in the middle of a message ends its receiver, and the group can "
    "go") {
  const auto results = run_ranks(
      2,
      [](const Rank& rank) {
        ddp::init_process_group(
            ddp::InitProcessGroupOptions("gloo").timeout(std::chrono::seconds(60)));
        const auto tensor = at::zeros({std::int64_t{256} << 20}, at::kByte);
        if (rank.rank() == 0) {
          ddp::broadcast(tensor, ddp::BroadcastOptions(0).async_op(true));
          // What waits in a socket to be sent is the message's: the store's are short.
          for (;;) {
            for (const auto& connection : ddp::detail::open_connections()) {
              int unsent = 0;
              if (ioctl(connection.fd, SIOCOUTQ, &unsent) == 0 && unsent > 100000) {
                rank.report("killed", 1);
                raise(SIGKILL);
              }
            }
          }
        }
        try {
          ddp::broadcast(tensor, 0);
        } catch (const ddp::CommunicationError& error) {
          rank.report("error", std::string(error.what()));
        }
        ddp::destroy_process_group();
        rank.report("destroyed", 1);
      },
      within(55));
  INFO(summary(results));
  CHECK(results[0].status == 128 + SIGKILL);
  CHECK(results[1].status == 0);
  CHECK_THAT(results[1]["error"], contains("rank 1 of 2: broadcast failed") && contains("rank 0"));
  CHECK(results[1]["destroyed"] == "1");
}

TEST_CASE("a killed peer ends the others' collective within 5 s, and is named") {
  for (const int victim : {0, 1}) {
    const auto results = run_ranks(
        3,
        [&](const Rank& rank) {
          start(milliseconds(30000));
          ddp::all_reduce(at::ones({1000}));
          if (rank.rank() == victim) {
            raise(SIGKILL);
          }
          ddp::all_reduce(at::ones({1000}));
        },
        within(20));
    INFO(victim << summary(results));
    for (int rank = 0; rank < 3; ++rank) {
      if (rank != victim) {
        CHECK(results[rank].error_type == "CommunicationError");
        CHECK_THAT(results[rank].error,
                   contains("rank " + std::to_string(rank) + " of 3: all_reduce failed"));
        CHECK_THAT(results[rank].error,
                   contains(victim == 0 ? "the process that serves it has ended (rank 0"
                                        : "no word from rank 1: killed"));
        CHECK(results[rank].seconds - results[victim].seconds < 5);
      }
    }
  }
}

TEST_CASE("a stopped peer ends the others' collective within the timeout") {
  pid_t stopped = 0;
  int ended = 0;
  const auto end = [&](int) {
    if (++ended == 2) {
      kill(stopped, SIGKILL);
    }
  };
  const Trigger stop{1, "stop", [&](int pid) {
                       stopped = pid;
                       kill(pid, SIGSTOP);
                     }};
  const auto results = run_ranks(3,
                                 [&](const Rank& rank) {
                                   start(milliseconds(2000));
                                   ddp::all_reduce(at::ones({1000}));
                                   if (rank.rank() == 1) {
                                     rank.report("stop", "now");
                                     pause();
                                   }
                                   try {
                                     ddp::all_reduce(at::ones({1000}));
                                   } catch (const ddp::CommunicationError&) {
                                     rank.report("ended", 1);
                                     throw;
                                   }
                                 },
                                 within(12), {stop, {0, "ended", end}, {2, "ended", end}});
  INFO(summary(results));
  for (const int rank : {0, 2}) {
    CHECK(results[rank].error_type == "CommunicationError");
    CHECK_THAT(results[rank].error, contains("no word from rank 1: killed, stopped"));
    CHECK(results[rank].seconds < 10);
  }
}

TEST_CASE(
    "after a failure every call says that the group is to be destroyed, and a new one works") {
  const auto results = run_ranks(2, [](const Rank& rank) {
    start();
    try {
      if (rank.rank() == 1) {
        ddp::detail::channel_of(ddp::default_group())->abort("its program went wrong");
      } else {
        ddp::all_reduce(at::ones({1000}));
      }
    } catch (const ddp::CommunicationError& error) {
      rank.report("error", error.what());
    }
    try {
      ddp::barrier();
    } catch (const ddp::CommunicationError& error) {
      rank.report("again", error.what());
    }
    ddp::destroy_process_group();
    start();
    const auto tensor = at::ones({1});
    ddp::all_reduce(tensor);
    rank.report("sum", tensor.item<float>());
    ddp::destroy_process_group();
  });
  INFO(summary(results));
  for (const auto& result : results) {
    CHECK(result.status == 0);
    CHECK_THAT(result["again"], contains("barrier: the process group failed earlier; destroy it"));
    CHECK(result["sum"] == "2.000000");
  }
  CHECK_THAT(results[0]["error"], contains("rank 0 of 2: all_reduce failed: "));
  CHECK_THAT(results[0]["error"], contains("rank 1 left: its program went wrong"));
}

TEST_CASE("a sub-group fails alone") {
  const auto results = run_ranks(3, [](const Rank& rank) {
    start();
    const auto group = ddp::new_group({0, 1});
    if (ddp::is_member(group)) {
      try {
        if (rank.rank() == 1) {
          ddp::detail::channel_of(group)->abort("its program went wrong");
        }
        ddp::all_reduce(at::ones({1000}), {}, group);
      } catch (const ddp::CommunicationError& error) {
        rank.report("error", error.what());
      }
    }
    const auto tensor = at::ones({1});
    ddp::all_reduce(tensor);
    rank.report("sum", tensor.item<float>());
    ddp::destroy_process_group();
  });
  INFO(summary(results));
  for (const auto& result : results) {
    CHECK(result.status == 0);
    CHECK(result["sum"] == "3.000000");
  }
  CHECK_THAT(results[0]["error"], contains("rank 1 left: its program went wrong"));
  CHECK_THAT(results[1]["error"], contains("the process group failed earlier"));
}

TEST_CASE(
    "a send or recv that begins after its peer has gone is a lost connection, not a wrong use") {
  for (const bool sends : {false, true}) {
    const auto results = run_ranks(2, [&](const Rank& rank) {
      start();
      const auto connections = ddp::detail::open_connections().size();
      ddp::barrier();
      if (rank.rank() == 1) {
        _exit(0);
      }
      // Rank 1's end of the store, and those of Gloo.
      while (ddp::detail::open_connections().size() + 3 > connections) {
        std::this_thread::yield();
      }
      const auto tensor = at::ones({4});
      sends ? ddp::send(tensor, 1) : ddp::recv(tensor, 1);
    });
    INFO(summary(results));
    CHECK(results[0].error_type == "CommunicationError");
    CHECK_THAT(results[0].error, contains(sends ? "send failed: " : "recv failed: "));
    CHECK_THAT(results[0].error, contains("no word from rank 1"));
  }
}

TEST_CASE("monitored_barrier names the missing ranks") {
  const auto results = run_ranks(
      4,
      [](const Rank& rank) {
        start(milliseconds(10000));
        if (rank.rank() == 0 || rank.rank() == 3) {
          ddp::monitored_barrier(milliseconds(800));
        } else {
          // Not in the barrier, but alive.
          ddp::default_group()->getStore()->wait({"ddp/failure/0"});
        }
      },
      within(20));
  INFO(summary(results));
  CHECK(results[0].error_type == "CommunicationError");
  CHECK_THAT(results[0].error, contains("monitored_barrier failed"));
  CHECK_THAT(results[0].error, contains("Ranks 1, 2 failed to pass monitoredBarrier in 800 ms"));
  CHECK(results[3].error_type == "CommunicationError");
}

TEST_CASE("TORCH_DISTRIBUTED_DEBUG=DETAIL names mismatching collectives, and the group stays") {
  auto options = within(30);
  options.environment["TORCH_DISTRIBUTED_DEBUG"] = "DETAIL";
  const auto results = run_ranks(
      2,
      [](const Rank& rank) {
        start(milliseconds(8000));
        ddp::all_reduce(at::ones({2}));
        try {
          ddp::all_reduce(at::ones({rank.rank() == 0 ? 3 : 5}));
        } catch (const ddp::UsageError& error) {
          rank.report("shapes", error.what());
        }
        try {
          if (rank.rank() == 0) {
            ddp::all_reduce(at::ones({4}));
          } else {
            ddp::broadcast(at::ones({4}));
          }
        } catch (const ddp::UsageError& error) {
          rank.report("kinds", error.what());
        }
        const auto tensor = at::ones({1});
        ddp::all_reduce(tensor);
        rank.report("sum", tensor.item<float>());
        ddp::destroy_process_group();
      },
      options);
  INFO(summary(results));
  for (int rank = 0; rank < 2; ++rank) {
    const auto& result = results[rank];
    CHECK(result.status == 0);
    CHECK(result["sum"] == "2.000000");
    CHECK_THAT(result["shapes"], contains("Detected mismatch between collectives on ranks"));
    CHECK_THAT(result["shapes"], contains("SequenceNumber="));
    CHECK_THAT(result["shapes"], contains("TensorShape=[3]"));
    CHECK_THAT(result["shapes"], contains("TensorShape=[5]"));
    CHECK_THAT(result["shapes"],
               contains("Rank " + std::to_string(rank) + " is running collective"));
    CHECK_THAT(result["kinds"], contains("ALLREDUCE"));
    CHECK_THAT(result["kinds"], contains("BROADCAST"));
  }
}

TEST_CASE("with DETAIL a killed peer still ends the others within 5 s") {
  auto options = within(30);
  options.environment["TORCH_DISTRIBUTED_DEBUG"] = "DETAIL";
  const auto results = run_ranks(
      3,
      [](const Rank& rank) {
        start(milliseconds(30000));
        ddp::all_reduce(at::ones({2}));
        if (rank.rank() == 2) {
          raise(SIGKILL);
        }
        ddp::all_reduce(at::ones({2}));
      },
      options);
  INFO(summary(results));
  for (const int rank : {0, 1}) {
    CHECK(results[rank].error_type == "CommunicationError");
    CHECK_THAT(results[rank].error, contains("no word from rank 2"));
    CHECK(results[rank].seconds - results[2].seconds < 5);
  }
}

TEST_CASE("a string that meets a value is refused") {
  const auto results = run_ranks(2, [](const Rank& rank) {
    start();
    try {
      if (rank.rank() == 0) {
        ddp::all_gather_object(std::string("a"));
      } else {
        ddp::all_gather_object(c10::IValue(1));
      }
    } catch (const ddp::UsageError& error) {
      rank.report("error", error.what());
    }
    ddp::destroy_process_group();
  });
  INFO(summary(results));
  for (const auto& result : results) {
    CHECK(result.status == 0);
    CHECK_THAT(result["error"],
               contains("a rank sent a std::string where another expected an IValue"));
  }
}
