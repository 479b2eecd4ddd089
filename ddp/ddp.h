#pragma once

/// Everything of ddp's C++ interface. Programs that mind their build time include single headers.

#include <ddp/data/distributed_sampler.h>
#include <ddp/distributed_data_parallel.h>
#include <ddp/error.h>
#include <ddp/process_group/collectives.h>
#include <ddp/process_group/process_group.h>
