"""What this library does with the inside of torch and Triton, each with the versions it is known
for and what happens without it. Nothing else here touches a private name of theirs."""
