"""Our changes to Ray and to Serve's HTTP server: a folder for each package, a file for each thing that is
changed, as in `workers/patches`.
"""
