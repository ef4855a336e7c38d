// Everything a program needs to train over several ranks. One folder's header is enough where compile time matters.
#pragma once

#include "weft/comm/mesh.h"
#include "weft/comm/world.h"
#include "weft/core/error.h"
#include "weft/data/loader.h"
#include "weft/nn/activations.h"
#include "weft/nn/deferred.h"
#include "weft/nn/sync_batch_norm.h"
#include "weft/nn/split.h"
#include "weft/nn/unit.h"
#include "weft/optim/ema.h"
#include "weft/optim/optim.h"
#include "weft/parallel/data_parallel.h"
#include "weft/parallel/parallelize.h"
