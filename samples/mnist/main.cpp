// Trains a convolutional network on handwritten digits: in this process alone, or as one of the
// processes of a data-parallel job. What the latter takes is marked with "ddp:".

#include <algorithm>
#include <chrono>
#include <cinttypes>
#include <cstdio>
#include <string>
#include <vector>

#include <torch/data/dataloader.h>
#include <torch/nn/functional/loss.h>
#include <torch/optim/sgd.h>

#include <ddp/ddp.h>

#include "agreement.h"
#include "digits.h"
#include "net.h"
#include "options.h"
#include "progress.h"
#include "saving.h"

namespace {

struct Job {
  int rank = 0;
  int world_size = 1;
  torch::Device device = torch::kCPU;
  torch::Dtype precision = torch::kFloat;
};

/// ddp: what the ranks have counted apart becomes their sum, on every rank.
torch::Tensor sum_over_ranks(torch::Tensor values) {
  if (ddp::is_initialized()) {
    ddp::all_reduce(values);
  }
  return values;
}

void print_epoch(int epoch, const Options& options, const Job& job, double loss,
                 double images_per_second, std::uint64_t checksum) {
  std::printf("epoch %d/%d: loss %.9g, %.0f images/s, parameters %016" PRIx64, epoch + 1,
              options.epochs, loss, images_per_second, checksum);
  std::puts(job.world_size > 1 ? " on all ranks" : "");
  std::fflush(stdout);
}

/// `model` is the network itself, or the network wrapped for data-parallel training.
template <class Model>
void train(Model& model, Digits dataset, const Options& options, const Job& job) {
  torch::optim::SGD optimizer(model->parameters(),
                              torch::optim::SGDOptions(options.lr).momentum(0.9));
  // ddp: each rank loads its own part of the images; a single process, all of them.
  ddp::DistributedSampler sampler(dataset.size().value(),
                                  ddp::DistributedSamplerOptions().seed(options.seed));
  const auto batch_size = static_cast<std::size_t>(options.batch_size);
  const auto steps = (sampler.size() + batch_size - 1) / batch_size;
  const bool shows_bar = job.rank == 0 && stdout_is_terminal();
  auto loader = torch::data::make_data_loader(std::move(dataset), sampler, batch_size);

  model->train();
  for (int epoch = 0; epoch < options.epochs; ++epoch) {
    ProgressBar bar("epoch " + std::to_string(epoch + 1), steps);
    auto totals =
        torch::zeros({2}, torch::dtype(torch::kDouble).device(job.device));  // loss, images
    const auto start = std::chrono::steady_clock::now();
    sampler.set_epoch(epoch);  // ddp: another order, the same one on all ranks
    for (auto& batch : *loader) {
      const auto images = batch.data.to(job.device, job.precision);
      const auto labels = batch.target.to(job.device);
      optimizer.zero_grad();
      const auto loss = torch::nn::functional::cross_entropy(model->forward(images), labels);
      loss.backward();  // ddp: averages the gradients over the ranks meanwhile
      optimizer.step();

      totals[0] += loss.detach() * images.size(0);
      totals[1] += images.size(0);
      if (options.check_every_step) {
        agreed_checksum(*model);
      }
      if (shows_bar) {
        bar.advance();
      }
    }
    totals = sum_over_ranks(totals).cpu();
    const std::chrono::duration<double> elapsed = std::chrono::steady_clock::now() - start;
    const auto loss_sum = totals[0].item<double>();
    const auto image_count = totals[1].item<double>();
    const auto checksum = agreed_checksum(*model);
    if (shows_bar) {
      bar.finish();
    }
    if (job.rank == 0) {
      print_epoch(epoch, options, job, loss_sum / image_count, image_count / elapsed.count(),
                  checksum);
    }
  }
}

/// The share of `dataset` that `net` gets right. Each rank looks at its part, without
/// DistributedSampler, which would count some images twice where the ranks cannot share evenly.
double accuracy(Net& net, Digits dataset, const Options& options, const Job& job) {
  const torch::NoGradGuard no_grad;
  net->eval();
  const auto size = dataset.size().value();
  auto correct = torch::zeros({}, torch::dtype(torch::kLong).device(job.device));
  std::vector<std::size_t> batch;
  for (auto index = static_cast<std::size_t>(job.rank); index < size; index += job.world_size) {
    batch.push_back(index);
    const bool is_last = index + job.world_size >= size;
    if (is_last || batch.size() == static_cast<std::size_t>(options.batch_size)) {
      const auto examples = dataset.get_batch(batch);
      const auto guesses = net->forward(examples.data.to(job.device, job.precision)).argmax(1);
      correct += (guesses == examples.target.to(job.device)).sum();
      batch.clear();
    }
  }
  return sum_over_ranks(correct).item<double>() / static_cast<double>(size);
}

void run(const Options& options) {
  Digits training(options.data, Digits::Part::kTraining);
  Digits test(options.data, Digits::Part::kTest);
  const bool is_distributed = options.local_rank >= 0;
  Job job;
  job.precision = options.double_precision ? torch::kDouble : torch::kFloat;
  if (is_distributed) {
    // ddp: meets the other processes, as the launcher's variables say.
    ddp::init_process_group(options.backend);
    job.rank = ddp::get_rank();
    job.world_size = ddp::get_world_size();
    job.device = ddp::local_device();
  }
  const bool saves = job.rank == 0 && !options.save.empty();
  if (saves) {
    check_can_save(options.save);
  }

  torch::manual_seed(static_cast<std::uint64_t>(options.seed));
  Net net(NetOptions{options.batch_norm});
  net->to(job.device, job.precision);
  if (is_distributed) {
    ddp::DistributedDataParallel model(net);  // ddp: begins with rank 0's parameters everywhere
    train(model, training, options, job);
    // ddp: each rank's running means saw its own images last; go on with those that are saved.
    for (const auto& buffer : net->buffers()) {
      ddp::broadcast(buffer);
    }
  } else {
    train(net, training, options, job);
  }

  const double share = accuracy(net, test, options, job);
  if (saves) {
    save(net, options.save);
  }
  if (job.rank == 0) {
    std::printf("test accuracy: %.3f\n", share);
    std::fflush(stdout);
  }
  ddp::destroy_process_group();  // ddp: says good-bye to the other processes
}

}  // namespace

int main(int argc, char** argv) {
  // ddp: what goes wrong is printed, and the launcher's report has it.
  return ddp::record_errors([&] {
    if (const auto options = parse_options(argc, argv)) {
      run(*options);
    }
  });
}
