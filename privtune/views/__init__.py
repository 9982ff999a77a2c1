"""Documents of a study for people: its record, the report, the privacy statement; none needs a tracker."""
