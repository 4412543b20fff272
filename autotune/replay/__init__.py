"""A recorded study answers in place of a device: the sampler and the decision rule, tried without one."""
