"""What people read of a study: its record, the report, the privacy statement. Needs no tracker."""
