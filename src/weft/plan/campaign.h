// A whole training: days, failures, checkpoints, price.
#pragma once

#include <string>

#include "weft/core/json.h"
#include "weft/plan/estimate.h"

namespace weft::plan {

/// What a device costs while it works; 0: not asked for.
struct Rates {
  double price = 0;  ///< of one device-hour
  double watts = 0;  ///< of one device with its share of host, network and cooling
};

struct CampaignInput {
  double tokens = 0;
  double device_mttf_s = 0;  ///< mean seconds to failure of one device
  double save_s = 60;        ///< blocking part of a checkpoint
  double restart_s = 600;    ///< failure to next step
};

struct Campaign {
  double tokens = 0;
  double train_s = 0;           ///< without failures
  double wall_s = 0;            ///< with failures and checkpoints
  double failure_s = 0;         ///< mean time between failures of the job
  double interval_s = 0;        ///< best checkpoint interval
  double effective = 1;         ///< share of wall time that trains
  double failures = 0;          ///< expected number
  double device_hours = 0;
  double compute_optimal_tokens = 0;
};

Campaign campaign(const Job& job, const Estimate& estimate, const CampaignInput& input);
std::string campaign_text(const Campaign& campaign, const Rates& rates);
Json campaign_json(const Campaign& campaign, const Rates& rates);

}  // namespace weft::plan
