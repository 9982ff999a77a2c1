"""Tables in files and databases: columns, cells, raw rows, drafts of specs, unusable records."""
