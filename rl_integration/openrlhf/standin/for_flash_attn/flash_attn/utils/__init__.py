"""Names that OpenRLHF's ring attention imports."""
