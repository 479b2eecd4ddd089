#include <test/support/catch2.h>
#include <test/support/ranks.h>

#include <ddp/ddp.h>

// Every collective on every dtype, on forked ranks over Gloo: one group runs all its cells.

using ddp::ReduceOp;
using ddp::test::Rank;
using ddp::test::run_ranks;
using ddp::test::summary;

namespace {

const std::vector<at::ScalarType> kReduced = {at::kFloat, at::kDouble, at::kHalf, at::kBFloat16,
                                              at::kChar,  at::kByte,   at::kInt,  at::kLong};
const std::vector<at::ScalarType> kMovedToo = {at::kBool, at::kShort, at::kComplexFloat,
                                               at::kComplexDouble, at::kFloat8_e4m3fn};

/// Small whole numbers of rank `rank`, different in every element, exact in every dtype: 1 to 4.
at::Tensor values(int rank, at::ScalarType dtype, std::int64_t count = 6) {
  return (at::arange(count, at::kLong) + rank).remainder(4).add(1).to(dtype);
}

bool same(const at::Tensor& found, const at::Tensor& expected) {
  return found.scalar_type() == expected.scalar_type() && found.sizes() == expected.sizes() &&
         found.to(at::kComplexDouble).equal(expected.to(at::kComplexDouble));
}

/// Collects the cells that are wrong.
class Cells {
 public:
  void check(const std::string& name, at::ScalarType dtype, const std::function<bool()>& holds) {
    ++count_;
    std::string why;
    try {
      if (holds()) {
        return;
      }
      why = "wrong values";
    } catch (const std::exception& error) {
      why = error.what();
    }
    wrong_ += name + " " + c10::toString(dtype) + ": " + why + "\n";
  }
  void report(const Rank& rank) const {
    rank.report("cells", count_);
    rank.report("wrong", wrong_);
  }

 private:
  int count_ = 0;
  std::string wrong_;
};

at::Tensor combined(ReduceOp::RedOpType op, int size, at::ScalarType dtype) {
  const bool floating = at::isFloatingType(dtype);
  auto result = values(0, floating ? at::kDouble : dtype);
  for (int rank = 1; rank < size; ++rank) {
    const auto next = values(rank, floating ? at::kDouble : dtype);
    result = op == ReduceOp::PRODUCT ? result * next
             : op == ReduceOp::MIN   ? at::minimum(result, next)
             : op == ReduceOp::MAX   ? at::maximum(result, next)
             : op == ReduceOp::BAND  ? result.bitwise_and(next)
             : op == ReduceOp::BOR   ? result.bitwise_or(next)
             : op == ReduceOp::BXOR  ? result.bitwise_xor(next)
                                     : result + next;
  }
  if (op == ReduceOp::AVG) {
    result = result / size;
  }
  return result.to(dtype);
}

void reduce_cells(Cells& cells, at::ScalarType dtype, const ddp::ProcessGroup& group) {
  const int rank = ddp::get_rank(group);
  const int size = ddp::get_world_size(group);
  const bool floating = at::isFloatingType(dtype);
  std::vector<ReduceOp::RedOpType> ops = {ReduceOp::SUM, ReduceOp::PRODUCT, ReduceOp::MIN,
                                          ReduceOp::MAX};
  if (floating) {
    ops.push_back(ReduceOp::AVG);
  } else {
    ops.insert(ops.end(), {ReduceOp::BAND, ReduceOp::BOR, ReduceOp::BXOR});
  }
  for (const auto op : ops) {
    const auto expected = combined(op, size, dtype);
    // A third is not exact; how it is rounded is the backend's.
    const auto close = [&](const at::Tensor& found) {
      return op == ReduceOp::AVG
                 ? at::allclose(found.to(at::kDouble), expected.to(at::kDouble), 1e-2, 1e-2)
                 : same(found, expected);
    };
    const auto name = "op " + std::to_string(op);
    cells.check("all_reduce " + name, dtype, [&] {
      const auto tensor = values(rank, dtype);
      auto work = ddp::all_reduce(tensor, ddp::AllReduceOptions(op).async_op(true), group);
      work.wait();
      return work.is_completed() && close(tensor);
    });
    cells.check("reduce " + name, dtype, [&] {
      const auto tensor = values(rank, dtype);
      ddp::reduce(tensor, ddp::ReduceOptions(1).op(op), group);
      return rank != 1 || close(tensor);
    });
    cells.check("reduce_scatter_tensor " + name, dtype, [&] {
      const auto output = at::zeros({6}, dtype);
      ddp::reduce_scatter_tensor(output, values(rank, dtype).repeat({size}), op, group);
      return close(output);
    });
    cells.check("reduce_scatter " + name, dtype, [&] {
      const auto output = at::zeros({2, 3}, dtype);
      const std::vector<at::Tensor> inputs(size, values(rank, dtype).view({2, 3}));
      ddp::reduce_scatter(output, inputs, op, group);
      return close(output.view({6}));
    });
  }
}

void move_cells(Cells& cells, at::ScalarType dtype, const ddp::ProcessGroup& group) {
  const int rank = ddp::get_rank(group);
  const int size = ddp::get_world_size(group);
  const int last = size - 1;
  const auto mine = values(rank, dtype);
  const auto empty = [&] {
    std::vector<at::Tensor> list;
    for (int other = 0; other < size; ++other) {
      list.push_back(at::zeros({6}, at::kByte).to(dtype));
    }
    return list;
  };
  const auto all_there = [&](const std::vector<at::Tensor>& list) {
    for (int other = 0; other < size; ++other) {
      if (!same(list[other], values(other, dtype))) {
        return false;
      }
    }
    return true;
  };
  cells.check("broadcast", dtype, [&] {
    const auto tensor = values(rank, dtype);
    ddp::broadcast(tensor, last, group);
    return same(tensor, values(last, dtype));
  });
  cells.check("broadcast of one number", dtype, [&] {
    const auto tensor = values(rank, dtype)[0];
    ddp::broadcast(tensor, last, group);
    return same(tensor, values(last, dtype)[0]);
  });
  cells.check("all_gather", dtype, [&] {
    const auto list = empty();
    ddp::all_gather(list, mine, ddp::AllGatherOptions().async_op(true), group).wait();
    return all_there(list);
  });
  cells.check("all_gather_into_tensor", dtype, [&] {
    const auto output = at::zeros({size, 6}, at::kByte).to(dtype);
    ddp::all_gather_into_tensor(output, mine, {}, group);
    return all_there(output.unbind());
  });
  cells.check("gather", dtype, [&] {
    const auto list = rank == last ? empty() : std::vector<at::Tensor>();
    ddp::gather(mine, list, last, group);
    return rank != last || all_there(list);
  });
  cells.check("scatter", dtype, [&] {
    std::vector<at::Tensor> list;
    for (int other = 0; rank == last && other < size; ++other) {
      list.push_back(values(other, dtype));
    }
    const auto output = empty()[0];
    ddp::scatter(output, list, last, group);
    return same(output, mine);
  });
  cells.check("all_to_all", dtype, [&] {
    // Rank r gives rank s r + s elements, none from rank 0 to itself.
    std::vector<at::Tensor> inputs;
    std::vector<at::Tensor> outputs;
    for (int other = 0; other < size; ++other) {
      inputs.push_back(values(rank * size + other, dtype, rank + other));
      outputs.push_back(at::zeros({rank + other}, at::kByte).to(dtype));
    }
    ddp::all_to_all(outputs, inputs, ddp::AllToAllOptions().async_op(true), group).wait();
    for (int other = 0; other < size; ++other) {
      if (!same(outputs[other], values(other * size + rank, dtype, rank + other))) {
        return false;
      }
    }
    return true;
  });
  cells.check("all_to_all_single", dtype, [&] {
    const auto output = at::zeros({size, 6}, at::kByte).to(dtype);
    ddp::all_to_all_single(output, mine.repeat({size}).view({size, 6}), {}, group);
    return all_there(output.unbind());
  });
  cells.check("all_to_all_single with splits", dtype, [&] {
    // Rank r gives rank s s + 1 rows of two, and so gets r + 1 rows from each.
    std::vector<std::int64_t> gives;
    for (int other = 0; other < size; ++other) {
      gives.push_back(other + 1);
    }
    const std::vector<std::int64_t> gets(size, rank + 1);
    const auto rows = size * (size + 1) / 2;
    const auto input = values(rank, dtype, 1).repeat({rows * 2}).view({rows, 2});
    const auto output = at::zeros({size * (rank + 1), 2}, at::kByte).to(dtype);
    ddp::all_to_all_single(
        output, input,
        ddp::AllToAllSingleOptions().input_split_sizes(gives).output_split_sizes(gets), group);
    for (int other = 0; other < size; ++other) {
      const auto part = output.narrow(0, other * (rank + 1), rank + 1);
      if (!same(part, values(other, dtype, 1).repeat({(rank + 1) * 2}).view({rank + 1, 2}))) {
        return false;
      }
    }
    return true;
  });
  cells.check("send and recv round the ring", dtype, [&] {
    const int next = (rank + 1) % size;
    const int previous = (rank + last) % size;
    const auto got = empty()[0];
    auto sent = ddp::send(mine, ddp::SendOptions(next).tag(3).async_op(true), group);
    auto work = ddp::recv(got, ddp::RecvOptions(previous).tag(3), group);
    sent.wait();
    return same(got, values(previous, dtype));
  });
  cells.check("recv from any rank", dtype, [&] {
    if (rank != 0) {
      ddp::send(mine, ddp::SendOptions(0).tag(5), group);
      return true;
    }
    int sources = 0;
    for (int other = 1; other < size; ++other) {
      const auto got = empty()[0];
      const auto work = ddp::recv(got, ddp::RecvOptions().tag(5), group);
      sources += work.source_rank();
      if (!same(got, values(work.source_rank(), dtype))) {
        return false;
      }
    }
    return sources == size * (size - 1) / 2;
  });
}

void special_cells(Cells& cells, const ddp::ProcessGroup& group) {
  const int rank = ddp::get_rank(group);
  const int size = ddp::get_world_size(group);
  cells.check("all_reduce", at::kComplexFloat, [&] {
    const auto tensor = at::complex(values(rank, at::kFloat), values(rank + 1, at::kFloat));
    ddp::all_reduce(tensor, {}, group);
    auto expected = at::zeros({6}, at::kComplexFloat);
    for (int other = 0; other < size; ++other) {
      expected += at::complex(values(other, at::kFloat), values(other + 1, at::kFloat));
    }
    return same(tensor, expected);
  });
  cells.check("all_reduce", at::kBool, [&] {
    const auto some = at::arange(size).eq(rank);
    const auto all = at::arange(size).ne(rank);
    const auto none = at::zeros({size}, at::kBool);
    ddp::all_reduce(some, ReduceOp::SUM, group);
    ddp::all_reduce(all, ReduceOp::PRODUCT, group);
    ddp::all_reduce(none, ReduceOp::MAX, group);
    return some.all().item<bool>() && !all.any().item<bool>() && !none.any().item<bool>() &&
           some.view(at::kByte).max().item<int>() == 1;
  });
  cells.check("all_reduce of a transposed tensor", at::kFloat, [&] {
    const auto tensor = values(rank, at::kFloat).view({2, 3}).t();
    ddp::all_reduce(tensor, {}, group);
    return same(tensor.t().reshape({6}), combined(ReduceOp::SUM, size, at::kFloat));
  });
  cells.check("broadcast of nothing", at::kFloat, [&] {
    ddp::broadcast(at::empty({0}), 0, group);
    return true;
  });
  cells.check("barriers", at::kFloat, [&] {
    ddp::barrier(group);
    ddp::barrier(ddp::BarrierOptions().async_op(true), group).wait();
    ddp::monitored_barrier({}, group);
    return true;
  });
}

void object_cells(Cells& cells, const ddp::ProcessGroup& group) {
  const int rank = ddp::get_rank(group);
  const int size = ddp::get_world_size(group);
  const auto text = [](int of) {
    return std::string(static_cast<std::size_t>(of) * 40, 'a') + std::to_string(of);
  };
  const auto value = [&](int of) {
    return c10::IValue(c10::ivalue::Tuple::create(
        {c10::IValue(of), c10::IValue(text(of)), at::full({of + 1}, of)}));
  };
  const auto is_value = [&](const c10::IValue& found, int of) {
    const auto& parts = found.toTupleRef().elements();
    return parts[0].toInt() == of && parts[1].toStringRef() == text(of) &&
           parts[2].toTensor().equal(at::full({of + 1}, of));
  };
  cells.check("objects: strings", at::kByte, [&] {
    bool good = ddp::broadcast_object(text(rank), 1, group) == text(1);
    const auto all = ddp::all_gather_object(text(rank), group);
    const auto gathered = ddp::gather_object(text(rank), 1, group);
    std::vector<std::string> list;
    for (int other = 0; other < size; ++other) {
      good = good && all[other] == text(other) && (rank != 1 || gathered[other] == text(other));
      list.push_back(text(other));
    }
    good = good && gathered.size() == (rank == 1 ? static_cast<std::size_t>(size) : 0);
    const auto own = ddp::scatter_object(rank == 1 ? list : std::vector<std::string>(), 1, group);
    return good && own == text(rank) && ddp::broadcast_object(std::string(), 0, group).empty();
  });
  cells.check("objects: values", at::kByte, [&] {
    bool good = is_value(ddp::broadcast_object(value(rank), 1, group), 1);
    const auto all = ddp::all_gather_object(value(rank), group);
    const auto gathered = ddp::gather_object(value(rank), 1, group);
    std::vector<c10::IValue> list;
    for (int other = 0; other < size; ++other) {
      good = good && is_value(all[other], other) && (rank != 1 || is_value(gathered[other], other));
      list.push_back(value(other));
    }
    return good &&
           is_value(ddp::scatter_object(rank == 1 ? list : std::vector<c10::IValue>(), 1, group),
                    rank);
  });
}

void all_cells(Cells& cells, const ddp::ProcessGroup& group) {
  for (const auto dtype : kReduced) {
    reduce_cells(cells, dtype, group);
    move_cells(cells, dtype, group);
  }
  for (const auto dtype : kMovedToo) {
    move_cells(cells, dtype, group);
  }
  special_cells(cells, group);
  object_cells(cells, group);
}

void check_all(const std::vector<ddp::test::RankResult>& results) {
  INFO(summary(results));
  for (const auto& result : results) {
    CHECK(result.status == 0);
    CHECK(result["wrong"] == "");
    CHECK(std::stoi(result["cells"]) > 300);
  }
}

}  // namespace

TEST_CASE("every collective on every dtype, 2 ranks") {
  check_all(run_ranks(2, [](const Rank& rank) {
    ddp::init_process_group(ddp::InitProcessGroupOptions().timeout(std::chrono::seconds(20)));
    Cells cells;
    all_cells(cells, {});
    cells.report(rank);
    ddp::destroy_process_group();
  }));
}

TEST_CASE("every collective on every dtype, 3 ranks, and on a sub-group of 2 of them") {
  check_all(run_ranks(3, [](const Rank& rank) {
    ddp::init_process_group(ddp::InitProcessGroupOptions().timeout(std::chrono::seconds(20)));
    Cells cells;
    all_cells(cells, {});
    const auto group = ddp::new_group({2, 0});
    if (ddp::is_member(group)) {
      all_cells(cells, group);
    }
    cells.report(rank);
    ddp::destroy_process_group();
  }));
}

TEST_CASE("the debug wrapper changes no result") {
  auto options = ddp::test::RankOptions();
  options.environment["TORCH_DISTRIBUTED_DEBUG"] = "DETAIL";
  const auto results = run_ranks(
      2,
      [](const Rank& rank) {
        ddp::init_process_group(ddp::InitProcessGroupOptions().timeout(std::chrono::seconds(20)));
        Cells cells;
        reduce_cells(cells, at::kFloat, {});
        move_cells(cells, at::kFloat, {});
        special_cells(cells, {});
        object_cells(cells, {});
        cells.report(rank);
        ddp::destroy_process_group();
      },
      options);
  INFO(summary(results));
  for (const auto& result : results) {
    CHECK(result.status == 0);
    CHECK(result["wrong"] == "");
  }
}
