#pragma once

/// Everything of ddp's C++ interface. Programs that mind their build time include single headers.

#include <ddp/comm_hooks/default_hooks.h>
#include <ddp/comm_hooks/periodic_model_averager.h>
#include <ddp/comm_hooks/post_local_sgd.h>
#include <ddp/comm_hooks/power_sgd.h>
#include <ddp/comm_hooks/quantization.h>
#include <ddp/data/distributed_sampler.h>
#include <ddp/distributed_data_parallel.h>
#include <ddp/error.h>
#include <ddp/nn/convert_sync_batchnorm.h>
#include <ddp/optim/grad_scaler.h>
#include <ddp/process_group/collectives.h>
#include <ddp/process_group/process_group.h>
#include <ddp/record_errors.h>
