"""Tests of launching plans on other machines."""
