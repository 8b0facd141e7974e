"""Measurements of the data plane beside the ceilings of this machine and beside its competitors."""
