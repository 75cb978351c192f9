-- KEYS: CHARGED
-- ARGV: tokens_a_minute, tokens_so_far, kept_seconds
-- An answer that is read twice, or by two replicas, is charged once. Returns the tokens that this call charged.
local bound, tokens = tonumber(tokens_a_minute), tonumber(tokens_so_far)
local charged = tonumber(redis.call('GET', CHARGED) or '0') or 0
if tokens <= charged then
  return 0
end
redis.call('SET', CHARGED, tokens, 'EX', kept_seconds)
keep({tokens = level_of('tokens', bound) - (tokens - charged)}, {tokens = bound})
return tokens - charged
