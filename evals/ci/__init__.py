"""A verdict in the formats that CI systems read, all written from one :class:`evals.ci.result.GateResult`."""
