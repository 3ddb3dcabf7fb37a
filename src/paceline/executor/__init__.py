"""Carries out step plans on one device: owns tensors, slots and the drafter. Never decides policy."""
