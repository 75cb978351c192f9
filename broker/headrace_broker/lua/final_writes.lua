-- Makes the final writes of a request whose message is no longer leased: it became a dead letter in a fetch.
-- KEYS: KEY[]
-- ARGV: writes[], values[], numbers[]
local refusal = final_writes_problem()
if refusal then return {err = refusal} end
make_final_writes()
return 1
