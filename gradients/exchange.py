"""Which way gradients take over ranks."""

from gradients import all_reduce, distributed, power_sgd, zero


def make(
  config: distributed.AllreduceConfig, world: distributed.Comm, scale
) -> all_reduce.AllReduce:
  """The exchange of a graph; arguments as of `all_reduce.AllReduce`."""
  kind = all_reduce.AllReduce
  if config.zero:
    kind = zero.ZeRO
  elif config.powersgd_rank:
    kind = power_sgd.PowerSGD
  return kind(config, world, scale)
