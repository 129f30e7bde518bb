"""From files and overrides to typed values: tree, yamlfile, layers, site, schema, fit, omega, in the order of use."""
