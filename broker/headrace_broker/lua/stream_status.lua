-- Reads the state of a request from its stream.
-- KEYS: STREAM
-- Returns nothing if there is no stream, else {attempt, tokens so far, type of the last entry, its data}.
local last, attempt, tokens = tail(STREAM)
if not last then return false end
return {attempt, tokens, field(last, 'type'), field(last, 'data')}
