"""Learning from preferences: ORPO, DPO, SimPO and KTO."""
