-- KEYS: the batch, a hash; the tokens of the claims, a hash.
-- ARGV: id, token of the claim, comma-separated statuses in which it may be written, fields and values.
-- Returns '' if it was written, 'lost' if another claim holds the batch or it is gone, else its status.
local status = redis.call('HGET', KEYS[1], 'status')
if not status or redis.call('HGET', KEYS[2], ARGV[1]) ~= ARGV[2] then
  return 'lost'
end
if not string.find(',' .. ARGV[3] .. ',', ',' .. status .. ',', 1, true) then
  return status
end
for i = 4, #ARGV, 2 do
  redis.call('HSET', KEYS[1], ARGV[i], ARGV[i + 1])
end
return ''
