"""Files, names and shorthand in, specs out; every preset says where its numbers are from."""

from meshwright.catalog.calibrations import calibration_path
from meshwright.catalog.decoders.load import Entry, describe, load_model, models, with_vocab
from meshwright.catalog.job_template import job_template
from meshwright.catalog.jobs import Origins, job_origins, job_remarks, load_design, load_job
from meshwright.catalog.local import local_cluster
from meshwright.catalog.machine import Machine, this_machine
from meshwright.catalog.shorthand import clusters, load_cluster
from meshwright.catalog.writer import dump_toml, save

__all__ = [
    "Entry",
    "Machine",
    "Origins",
    "calibration_path",
    "clusters",
    "describe",
    "dump_toml",
    "job_origins",
    "job_remarks",
    "job_template",
    "load_cluster",
    "load_design",
    "load_job",
    "load_model",
    "local_cluster",
    "models",
    "save",
    "this_machine",
    "with_vocab",
]
