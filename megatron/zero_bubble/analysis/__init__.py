"""What can be said of a schedule without running it: is it valid, how long does it take, what does it keep."""
