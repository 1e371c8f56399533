"""Launching: a plan started on the machines that people have, as a script or a manifest that is shown first."""
