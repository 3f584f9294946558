"""The simulator against reality: the same requests in the real system and on virtual time.

Measuring writes what was asked, what was seen, and what steps took in loads of known composition; comparing
simulates the same requests with step times fitted to those, anywhere and at any time.
"""
